import { execFileSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { collectEnvironment, recordedVariables } from './environment.js';

let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-env-'));
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

test('settings are recorded, other variables and everything like a credential are not', () => {
  const recorded = recordedVariables({
    NSA_SEQ_LEN: '2048',
    NSA_TOKENIZER: 'gpt2',
    RANK: '0',
    DDP_SAFE: '1',
    MASTER_ADDR: 'node1',
    NSA_API_KEY: 'x',
    NSA_HF_TOKEN: 'x',
    nsa_token: 'x',
    NSA_SECRET: 'x',
    NSA_DB_PASSWORD: 'x',
    HF_TOKEN: 'x',
    HOME: '/root',
    RANK_SECRET: 'x',
  });
  const settings = { NSA_SEQ_LEN: '2048', NSA_TOKENIZER: 'gpt2' };
  expect(recorded).toEqual({ ...settings, RANK: '0', DDP_SAFE: '1', MASTER_ADDR: 'node1' });
});

test('a password inside a URL is removed', () => {
  expect(recordedVariables({ NSA_PROXY: 'http://user:pass@host:80/x' })).toEqual({ NSA_PROXY: 'http://host:80/x' });
});

test('the machine and the versions are named', () => {
  const { machine, versions } = collectEnvironment({}, folder);
  expect(machine.cores).toBeGreaterThan(0);
  expect(machine.memory_mib).toBeGreaterThan(100);
  expect(versions['node']).toBe(process.versions.node);
  expect(versions['trefoil']).toMatch(/^\d+\.\d+\.\d+/);
});

test('the commit is that of the folder; outside a repository it is null', () => {
  expect(collectEnvironment({}, folder).git).toBeNull();
  expect(collectEnvironment({}, join(folder, 'none')).git).toBeNull();
  const git = (...words: string[]): string =>
    execFileSync('git', ['-C', folder, ...words], { encoding: 'utf8' }).trim();
  git('init', '-q', '-b', 'trunk');
  expect(collectEnvironment({}, folder).git).toBeNull(); // no commit yet
  writeFileSync(join(folder, 'file'), 'one');
  git('add', 'file');
  git('-c', 'user.name=t', '-c', 'user.email=t@example.org', 'commit', '-q', '-m', 'first');
  expect(collectEnvironment({}, folder).git).toEqual({
    commit: git('rev-parse', 'HEAD'),
    branch: 'trunk',
    dirty: false,
  });
  writeFileSync(join(folder, 'file'), 'two');
  expect(collectEnvironment({}, folder).git?.dirty).toBe(true);
  git('checkout', '-q', '--detach');
  expect(collectEnvironment({}, folder).git?.branch).toBe('HEAD');
});
