import { chmodSync, existsSync, readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { UsageError } from '../../errors.js';
import { temporaryFolder } from '../../testing/run.js';
import { createSecret, runKey } from './secret.js';

let folder: ReturnType<typeof temporaryFolder>;
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

const run = { runId: 'run' };
const cache = () => ({ TREFOIL_CACHE: join(folder.path, 'cache') });
const file = () => join(folder.path, 'cache', 'run-secret');

describe('the key of a run', () => {
  it('follows from the secret, the run and the attempt', () => {
    const [one, other] = [createSecret(), createSecret()];
    const key = runKey(run, { TREFOIL_RUN_SECRET: one });
    expect(key).toMatch(/^[0-9a-f]{64}$/);
    expect(key).not.toContain(one);
    expect(runKey(run, { TREFOIL_RUN_SECRET: `${one}\n` })).toBe(key);
    expect(runKey(run, { TREFOIL_RUN_SECRET: other })).not.toBe(key);
    expect(runKey({ runId: 'another' }, { TREFOIL_RUN_SECRET: one })).not.toBe(key);
    expect(runKey(run, { TREFOIL_RUN_SECRET: one, TORCHELASTIC_RESTART_COUNT: '1' })).not.toBe(key);
  });

  it('comes from a file that only its owner can access', () => {
    const path = join(folder.path, 'secret');
    const secret = createSecret();
    writeFileSync(path, `${secret}\n`, { mode: 0o600 });
    const env = { TREFOIL_RUN_SECRET_FILE: path };
    expect(runKey(run, env)).toBe(runKey(run, { TREFOIL_RUN_SECRET: secret }));
    for (const mode of [0o640, 0o604, 0o620, 0o602]) {
      chmodSync(path, mode);
      expect(() => runKey(run, env)).toThrow(
        `TREFOIL_RUN_SECRET_FILE: ${path} is accessible to other users: run \`chmod 600 ${path}\``,
      );
    }
  });

  it('comes from a file in the cache folder otherwise, which is created once', () => {
    const key = runKey(run, cache());
    expect(statSync(file()).mode & 0o777).toBe(0o600);
    expect(readFileSync(file(), 'utf8').trim()).toHaveLength(64);
    expect(runKey(run, cache())).toBe(key);
    expect(readdirSync(join(folder.path, 'cache'))).toEqual(['run-secret']);
    chmodSync(file(), 0o644);
    expect(() => runKey(run, cache())).toThrow(`${file()} is accessible to other users`);
  });

  it('is not created where a secret is given', () => {
    runKey(run, { ...cache(), TREFOIL_RUN_SECRET: createSecret() });
    expect(existsSync(file())).toBe(false);
  });

  it('is refused when it can be guessed, or its file cannot be read or created', () => {
    expect(() => runKey(run, { TREFOIL_RUN_SECRET: 'short' })).toThrow(UsageError);
    expect(() => runKey(run, { TREFOIL_RUN_SECRET: 'short' })).toThrow(
      'TREFOIL_RUN_SECRET has 5 characters, at least 16 are needed: use the output of `openssl rand -hex 32`',
    );
    const missing = join(folder.path, 'missing');
    expect(() => runKey(run, { TREFOIL_RUN_SECRET_FILE: missing })).toThrow(
      `TREFOIL_RUN_SECRET_FILE: ${missing} cannot be read (ENOENT)`,
    );
    writeFileSync(join(folder.path, 'file'), '');
    const env = { TREFOIL_CACHE: join(folder.path, 'file') };
    expect(() => runKey(run, env)).toThrow('cannot be created (ENOTDIR): set TREFOIL_RUN_SECRET to the same random');
  });
});
