/** The built program, as a user runs it: `node dist/cli/main.js` from another folder. */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { readSafetensors, toFloat64 } from '../run/safetensors.js';
import { GOLDEN_SMALL } from '../testing/golden.js';
import { relativeError } from '../testing/numbers.js';
import { INVARIANTS } from '../verify/check.js';

const ROOT = fileURLToPath(new URL('../../', import.meta.url));
const MAIN = join(ROOT, 'dist', 'cli', 'main.js');

let folder: string;
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-main-'));
  const build = [join(ROOT, 'scripts', 'build.mjs'), '--quiet'];
  const { status, stdout, stderr } = spawnSync(process.execPath, build, { cwd: ROOT, encoding: 'utf8' });
  if (status !== 0) throw new Error(`the build failed:\n${stdout}${stderr}`);
}, 300_000);
afterAll(() => rmSync(folder, { recursive: true, force: true }));

function trefoil(...words: string[]) {
  const { status, stdout, stderr } = spawnSync(process.execPath, [MAIN, ...words], { cwd: folder, encoding: 'utf8' });
  return { status, stdout, stderr };
}

describe('the built program', () => {
  it('says what it can do, quickly', () => {
    const started = performance.now();
    const { status, stdout, stderr } = trefoil('--help');
    expect({ status, stderr }).toEqual({ status: 0, stderr: '' });
    expect(stdout).toContain('Usage: trefoil');
    expect(performance.now() - started).toBeLessThan(5000); // a fifth of a second on an idle machine
  });

  it('can be run as a program of its own', () => {
    expect(spawnSync(MAIN, ['--version'], { encoding: 'utf8' }).stdout).toMatch(/^\d+\.\d+\.\d+\n$/);
  });

  it('refuses in one line, with code 2', () => {
    expect(trefoil('verfiy')).toEqual({
      ...{ status: 2, stdout: '' },
      stderr: "trefoil: unknown command 'verfiy' (did you mean verify?)\n",
    });
  });

  it('is quiet when the reader of its output goes away', () => {
    const script = `set -o pipefail; "${process.execPath}" "${MAIN}" bench attention --lengths 64 --quick --dim 8 --csv 2>err | true`;
    expect(
      spawnSync('bash', ['-c', `${script}; echo $?; grep -v '^S ' err`], { cwd: folder, encoding: 'utf8' }).stdout,
    ).toBe('0\n');
  });

  it('computes a golden case', () => {
    const { status, stderr } = trefoil('attend', '--in', GOLDEN_SMALL, '--out', 'out.safetensors', '--device', 'cpu');
    expect({ status, stderr }).toEqual({ status: 0, stderr: '' });
    const [written, golden] = [join(folder, 'out.safetensors'), GOLDEN_SMALL].map(readSafetensors);
    for (const name of ['out', 'dq', 'dk_sel'])
      expect(
        relativeError(toFloat64(written.tensors.get(name)!), toFloat64(golden.tensors.get(name)!)),
        name,
      ).toBeLessThan(2e-5);
  });

  it('verifies this machine', { timeout: 240_000 }, () => {
    const { status, stdout, stderr } = trefoil('verify', '--json');
    const { passed, failed, skipped, rows } = JSON.parse(stdout);
    expect(rows.filter((row: { ok: boolean | null }) => row.ok === false)).toEqual([]);
    expect({ status, stderr, failed }).toEqual({ status: 0, stderr: '', failed: 0 });
    expect(passed + skipped).toBe(rows.length);
    for (const invariant of INVARIANTS)
      expect(rows).toContainEqual(expect.objectContaining({ device: 'cpu', invariant, ok: true }));
    expect(Object.keys(rows[0])).toEqual(['device', 'invariant', 'case', 'ok', 'error', 'limit', 'reason']);
  });
});
