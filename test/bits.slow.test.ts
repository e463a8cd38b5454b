/**
 * One set of bits: sixteen operations with their gradients and the first steps of the quickstart, computed by kernels as
 * other compilers make them for other processors (`dev/bits.mjs`). The short form compares two widths of vectors.
 */
import { execFile, spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { beforeAll, describe, expect, it, type TestContext } from 'vitest';
import { root, runNode, trefoil, trefoilMain } from '../src/testing/cli.js';

const isLong = Boolean(process.env['TREFOIL_LONG']);
const program = join(root, 'dev', 'bits.mjs');
const flags = existsSync('/proc/cpuinfo') ? readFileSync('/proc/cpuinfo', 'utf8') : '';
const can = (set: string) => new RegExp(`\\b${set}\\b`).test(flags);
const isInstalled = (command: string) => spawnSync(command, ['--version']).status === 0;

interface Bits {
  readonly hashes: Readonly<Record<string, string>>;
  readonly quickstart?: { readonly losses: readonly number[]; readonly weights: string };
}

async function bits(env: Record<string, string>, words: readonly string[] = [], node?: string): Promise<Bits> {
  if (node !== undefined) {
    const { stdout } = await promisify(execFile)(node, [program, ...words], {
      cwd: root,
      env: { ...process.env, ...env },
    });
    return JSON.parse(stdout) as Bits;
  }
  const { code, stdout, stderr } = await runNode([program, ...words], { env });
  expect(code, stderr).toBe(0);
  return JSON.parse(stdout) as Bits;
}

/** Another version of Node for this machine, from npm's registry. */
async function nodeFromNpm(version: number): Promise<{ folder: string; remove: () => void }> {
  const folder = mkdtempSync(join(tmpdir(), `trefoil-node-${version}-`));
  const run = promisify(execFile);
  const name = `node-${process.platform}-${process.arch}@${version}`;
  const { stdout } = await run('npm', ['pack', name, '--silent', '--pack-destination', folder]);
  await run('tar', ['-xzf', join(folder, stdout.trim().split('\n').at(-1)!), '-C', folder]);
  return { folder, remove: () => rmSync(folder, { recursive: true, force: true }) };
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

  for (const version of [22, 24])
    it(`in WebAssembly with Node ${version}`, { timeout: 900_000 }, async (context) => {
      if (!isLong) skipped(context, 'brings another Node from npm: TREFOIL_LONG=1');
      const { folder, remove } = await nodeFromNpm(version);
      try {
        const found = await bits({ TREFOIL_KERNELS: 'wasm' }, [], join(folder, 'package', 'bin', 'node'));
        expect(found).toEqual(own);
      } finally {
        remove();
      }
    });

  it('in WebAssembly, up to rounding where products are not fused', async () => {
    const plain = await bits({ TREFOIL_KERNELS: 'wasm' });
    // Random numbers and copies are exact in all sets.
    expect(plain.hashes['random']).toBe(own.hashes['random']);
    plain.quickstart!.losses.forEach((loss, i) => {
      expect(Math.abs(loss - own.quickstart!.losses[i])).toBeLessThan(1e-3);
    });
  });
});

it('trains without a compiler and without koffi, and says so in one line', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'trefoil-no-compiler-'));
  try {
    const out = join(folder, 'run');
    const words = [
      'train',
      '--config',
      'quickstart',
      '--steps',
      '2',
      '--device',
      'cpu',
      '--set',
      `train.out_dir=${out}`,
    ];
    const env = { CXX: 'no-such-compiler', TREFOIL_CACHE: join(folder, 'cache'), TREFOIL_KERNELS: '' };
    const { code, stderr } = await trefoil(words, { env });
    expect(code, stderr).toBe(0);
    expect(stderr.match(/^trefoil: kernels run in WebAssembly, .*there is no C\+\+ compiler/gm)).toHaveLength(1);
    const { kernel_source: source } = JSON.parse(readFileSync(join(out, 'env.json'), 'utf8'));
    expect(source).toMatchObject({ kind: 'wasm', name: expect.stringMatching(/^kernels(-fma)?\.wasm$/) });
    const program = `import { openDevice } from ${JSON.stringify(join(root, 'dist/index.js'))};
      openDevice('cpu');
      console.log(process.report.getReport().sharedObjects.filter((path) => /koffi/.test(path)).length);`;
    const opened = await runNode(['--input-type=module', '-e', program], { env: { TREFOIL_KERNELS: 'wasm' } });
    expect(opened.stdout.trim(), opened.stderr).toBe('0');
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
});
