/** The built program, as a user runs it: `node dist/cli/main.js` from another folder. */
import { execFile } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { readSafetensors } from '../run/safetensors.js';
import { toFloat64 } from '../run/safetensors-format.js';
import { trefoilMain } from '../testing/cli.js';
import { countUsage } from '../testing/cpu-time.js';
import { GOLDEN_SMALL } from '../testing/golden.js';
import { relativeError } from '../testing/numbers.js';

const MAIN = trefoilMain();

let folder: string;
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-main-'));
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

interface Outcome {
  readonly status: number;
  readonly stdout: string;
  readonly stderr: string;
}

/** Not spawnSync: vitest must hear from this process at least once a minute. */
function start(program: string, words: readonly string[], cwd: string, variables = {}): Promise<Outcome> {
  const env = { ...process.env, ...variables };
  return new Promise((resolve) => {
    execFile(program, words, { cwd, env, maxBuffer: 2 ** 26 }, (error, stdout, stderr) =>
      resolve({ status: error ? Number(error.code) : 0, stdout, stderr }),
    );
  });
}

const trefoil = (...words: string[]) => start(process.execPath, [MAIN, ...words], folder);

describe('the built program', () => {
  it('says what it can do, quickly', async () => {
    const usage = countUsage(folder);
    const { status, stdout, stderr } = await start(process.execPath, [MAIN, '--help'], folder, usage.env);
    expect({ status, stderr }).toEqual({ status: 0, stderr: '' });
    expect(stdout).toContain('Usage: trefoil');
    expect(usage.read().ms).toBeLessThan(2000); // a fifth of a second on an idle machine
  });

  it('can be run as a program of its own', async () => {
    expect((await start(MAIN, ['--version'], folder)).stdout).toMatch(/^\d+\.\d+\.\d+\n$/);
  });

  it('refuses in one line, with code 2', async () => {
    expect(await trefoil('verfiy')).toEqual({
      status: 2,
      stdout: '',
      stderr: "trefoil: unknown command 'verfiy' (did you mean verify?)\n",
    });
  });

  it('is quiet when the reader of its output goes away', async () => {
    const script = `set -o pipefail; "${process.execPath}" "${MAIN}" bench attention --lengths 64 --quick --dim 8 --csv 2>err | true`;
    const { stdout } = await start('bash', ['-c', `${script}; echo $?; cat err`], folder);
    expect(stdout).toBe('0\n');
  });

  it('computes a golden case', async () => {
    const { status, stderr } = await trefoil(
      'attend',
      '--in',
      GOLDEN_SMALL,
      '--out',
      'out.safetensors',
      '--device',
      'cpu',
    );
    expect({ status, stderr }).toEqual({ status: 0, stderr: '' });
    const [written, golden] = [join(folder, 'out.safetensors'), GOLDEN_SMALL].map(readSafetensors);
    for (const name of ['out', 'dq', 'dk_sel'])
      expect(
        relativeError(toFloat64(written.tensors.get(name)!), toFloat64(golden.tensors.get(name)!)),
        name,
      ).toBeLessThan(2e-5);
  });
});
