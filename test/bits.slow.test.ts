/**
 * One set of bits: sixteen operations with their gradients and the first steps of the quickstart, computed by kernels as
 * other compilers make them for other processors (`dev/bits.mjs`). The short form compares two widths of vectors.
 */
import { spawnSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { beforeAll, describe, expect, it, type TestContext } from 'vitest';
import { root, runNode, trefoilMain } from '../src/testing/cli.js';

const isLong = Boolean(process.env['TREFOIL_LONG']);
const program = join(root, 'dev', 'bits.mjs');
const flags = existsSync('/proc/cpuinfo') ? readFileSync('/proc/cpuinfo', 'utf8') : '';
const can = (set: string) => new RegExp(`\\b${set}\\b`).test(flags);
const isInstalled = (command: string) => spawnSync(command, ['--version']).status === 0;

interface Bits {
  readonly hashes: Readonly<Record<string, string>>;
  readonly quickstart?: { readonly losses: readonly number[]; readonly weights: string };
}

async function bits(env: Record<string, string>, words: readonly string[] = []): Promise<Bits> {
  const { code, stdout, stderr } = await runNode([program, ...words], { env });
  expect(code, stderr).toBe(0);
  return JSON.parse(stdout) as Bits;
}

function skipped(context: TestContext, reason: string): never {
  console.warn(`skipped: ${reason}`);
  return context.skip(reason);
}

describe('the same bits', () => {
  let own: Bits;
  beforeAll(async () => {
    trefoilMain();
    own = await bits({});
    expect(Object.keys(own.hashes)).toHaveLength(16);
    expect(own.quickstart?.losses).toHaveLength(25);
  });

  it('with vectors of 16 and of 8 numbers', async (context) => {
    if (!can('avx512f')) skipped(context, 'this processor has no AVX-512');
    expect(await bits({ TREFOIL_MARCH: 'x86-64-v3' })).toEqual(own);
  });

  it('with three threads', async () => {
    expect(await bits({}, ['--threads', '3'])).toEqual(own);
  });

  for (const compiler of ['clang++', 'clang++-19'])
    it(`with ${compiler}`, async (context) => {
      if (!isLong) skipped(context, 'compiles all kernels again: TREFOIL_LONG=1');
      if (!isInstalled(compiler)) skipped(context, `${compiler} is not installed: apt-get install clang`);
      expect(await bits({ CXX: compiler })).toEqual(own);
    });
});
