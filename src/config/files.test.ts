import { chmodSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { findConfig, readLayer } from './files.js';
import { packageRoot, shippedConfigs } from './shipped.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-config-'));
afterAll(() => rmSync(folder, { recursive: true }));

function file(text: string): { path: string; label: string } {
  const path = join(folder, 'x.yaml');
  writeFileSync(path, text);
  return { path, label: 'x.yaml' };
}

describe('findConfig', () => {
  it('finds a shipped config by name', () => {
    expect(findConfig('base')).toEqual({ path: join(packageRoot, 'configs/base.yaml'), label: 'configs/base.yaml' });
  });

  it('finds a profile by name', () => {
    expect(findConfig('h200', 'configs/profiles').label).toBe('configs/profiles/h200.yaml');
  });

  it('finds a file by path and calls it as the user did', () => {
    const { path } = file('');
    expect(findConfig(path)).toEqual({ path, label: path });
  });

  it('finds configs/x.yaml of a runbook from any folder', () => {
    mkdirSync(join(folder, 'configs'), { recursive: true });
    writeFileSync(join(folder, 'configs/only_here.yaml'), '');
    for (const name of ['configs/only_here.yaml', './configs/only_here.yaml']) {
      expect(findConfig(name, 'configs', folder).path).toBe(join(folder, 'configs/only_here.yaml'));
    }
  });

  it.each([
    ['bse', 'bse: no such file and no shipped config (did you mean base?)'],
    ['base.yaml', 'base.yaml: no such file and no shipped config (did you mean base?)'],
    ['configs/125m_8g.yaml', 'configs/125m_8g.yaml: no such file and no shipped config (did you mean 125m_80g?)'],
  ])('%s is not there', (name, message) => expect(() => findConfig(name)).toThrow(message));

  it('lists what is shipped when no name is near', () => {
    expect(() => findConfig('/nowhere/zzzzzzzzzzzz')).toThrow(/shipped: 125m_1m, 125m_1xa100_production, 125m_24g/);
    expect(() => findConfig('zzzzzzzz', 'configs/profiles')).toThrow('no shipped profile; shipped: a100, cpu, h200');
  });

  it('lists names without endings', () =>
    expect(shippedConfigs('configs/profiles')).toEqual(['a100', 'cpu', 'h200', 'rtx4090']));
});

describe('readLayer', () => {
  it('reads YAML and knows the line and column of each value', () => {
    const layer = readLayer(file('# a comment\ntrain:\n  lr: 3e-4\n  betas: [0.9, 0.99]\n'));
    expect(layer.get('train.lr')).toEqual({ value: 3e-4, origin: 'x.yaml', where: 'x.yaml:3:7' });
    expect(layer.get('train.betas')?.value).toEqual([0.9, 0.99]);
  });

  it('takes the origin it is told', () => {
    expect(readLayer(file('train: {lr: 1}'), 'profile x').get('train.lr')?.origin).toBe('profile x');
  });

  it.each([
    ['a tab', 'train:\n\tlr: 1\n', /^x\.yaml:2:\d+: /],
    ['an open bracket', 'train:\n  betas: [0.9\n', /^x\.yaml:\d+:\d+: /],
    ['a key twice', 'train:\n  lr: 1\n  lr: 2\n', /^x\.yaml:3:3: Map keys must be unique/],
    ['two documents', 'train: {}\n---\ntrain: {}\n', /^x\.yaml:2:1: /],
    ['an alias to nowhere', 'train:\n  lr: *nowhere\n', /^x\.yaml.*nowhere/],
    [
      'an unknown key',
      'train:\n  lr: 1\n  stepz: 2\n',
      /^train\.stepz: unknown key \(did you mean steps\?\) \[x\.yaml:3:10\]$/,
    ],
    ['no mapping', '- 1\n', /^config: not a mapping/],
  ])('%s names file, line and column', (_, text, message) => expect(() => readLayer(file(text))).toThrow(message));

  it('refuses aliases that multiply', () => {
    const rows = ['a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]'];
    for (let i = 1; i < 9; i++) {
      const name = String.fromCharCode(97 + i);
      const below = `*${String.fromCharCode(96 + i)}`;
      rows.push(`${name}: &${name} [${Array(10).fill(below).join(', ')}]`);
    }
    expect(() => readLayer(file(rows.join('\n')))).toThrow(/^x\.yaml: /);
  });

  it('refuses a folder, a huge file and one that is gone', () => {
    expect(() => readLayer({ path: folder, label: 'f' })).toThrow('f: is a folder; give a YAML file');
    expect(() => readLayer(file('#'.repeat((1 << 20) + 1)))).toThrow('too large for a config');
    expect(() => readLayer({ path: join(folder, 'gone'), label: 'gone' })).toThrow('gone: cannot be read (ENOENT)');
  });

  it('refuses a file without permission', () => {
    const locked = file('');
    chmodSync(locked.path, 0);
    // Root may read everything, so the call runs as an unprivileged user.
    const isRoot = process.geteuid?.() === 0;
    if (isRoot) process.seteuid!(65534);
    try {
      expect(() => readLayer(locked)).toThrow('cannot be read (EACCES)');
    } finally {
      if (isRoot) process.seteuid!(0);
      chmodSync(locked.path, 0o600);
    }
  });
});
