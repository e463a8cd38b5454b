import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { parseTrainFlags } from '../cli/shared/train-flags.js';
import { loadConfig, pickConfigByGpuMemory, readConfig, readSavedConfig } from './load.js';
import { parseConfig } from './parse.js';
import { toYaml } from './print.js';
import { shippedConfigs } from './shipped.js';

const root = mkdtempSync(join(tmpdir(), 'trefoil-load-'));
mkdirSync(join(root, 'configs/profiles'), { recursive: true });
const write = (name: string, text: string) => writeFileSync(join(root, 'configs', `${name}.yaml`), text);
write('mine', 'train:\n  lr: 0.002\n  steps: 20\nruntime:\n  profile: fast\n');
write('other', 'train:\n  steps: 99\n');
write('profiles/fast', 'train:\n  lr: 0.003\n  steps: 30\n  log_every: 3\n');
write('profiles/slow', 'train:\n  log_every: 77\n');
write('profiles/loop', 'runtime:\n  profile: fast\n');
afterAll(() => rmSync(root, { recursive: true }));

const load = (argv: string[], env: Record<string, string> = {}, otherwise: string | null = null) => {
  const line = parseTrainFlags(argv);
  return loadConfig({ env, flags: line.layer, config: line.config, otherwise, root });
};

describe('precedence', () => {
  const layers: [string, string[], Record<string, string>, unknown, string][] = [
    ['default', [], {}, 2e-4, 'default'],
    ['profile over default', ['--config', 'other', '--set', 'runtime.profile=fast'], {}, 0.003, 'profile fast'],
    ['file over profile', ['--config', 'mine'], {}, 0.002, 'configs/mine.yaml'],
    ['environment over file', ['--config', 'mine'], { NSA_LR: '0.001' }, 0.001, 'env NSA_LR'],
    ['flag over environment', ['--config', 'mine', '--set', 'train.lr=0.5'], { NSA_LR: '0.001' }, 0.5, 'flag --set'],
  ];
  it.each(layers)('%s', (_, argv, env, value, origin) => {
    const resolved = load(argv, env);
    expect(resolved.config.train.lr).toBe(value);
    expect(resolved.origins.get('train.lr')).toBe(origin);
  });

  it('holds for each key on its own', () => {
    const { config, origins } = load(['--config', 'mine', '--seq-len', '64'], { NSA_BATCH_SIZE: '3' });
    expect(config.train).toMatchObject({ seq_len: 64, batch_size: 3, lr: 0.002, log_every: 3, grad_clip: 1 });
    expect(
      ['seq_len', 'batch_size', 'lr', 'log_every', 'grad_clip'].map((name) => origins.get(`train.${name}`)),
    ).toEqual(['flag --seq-len', 'env NSA_BATCH_SIZE', 'configs/mine.yaml', 'profile fast', 'default']);
  });

  it('a flag chooses another profile than the file', () => {
    expect(load(['--config', 'mine', '--set', 'runtime.profile=slow']).config.train.log_every).toBe(77);
    expect(load(['--config', 'mine', '--set', 'runtime.profile=null']).config.train.log_every).toBe(20);
  });

  it('gives every key an origin', () => expect(new Set(load([]).origins.values())).toEqual(new Set(['default'])));
});

describe('which file', () => {
  it('--config over CONFIG over the choice of the caller over none', () => {
    expect(load(['--config', 'mine'], { CONFIG: 'other' }, 'other').file).toBe('configs/mine.yaml');
    expect(load([], { CONFIG: 'configs/mine.yaml' }, 'other').file).toBe('configs/mine.yaml');
    expect(load([], { CONFIG: '' }, 'other').file).toBe('configs/other.yaml');
    expect(load([]).file).toBeNull();
  });
});

describe('fused kernels: env over file, and within one of them the branch over the whole', () => {
  const fused = (yaml: string, env: Record<string, string>) => {
    write('fused', `runtime:\n  ${yaml}\n`);
    return load(['--config', 'fused'], env).config.runtime.fused;
  };
  it.each<[string, Record<string, string>, boolean]>([
    ['use_fa2_win: true', { NSA_USE_FA2: '0' }, false],
    ['use_fa2_win: true', { NSA_USE_FA2: '0', NSA_USE_FA2_WIN: '1' }, false],
    ['use_fa2: true', { NSA_USE_FA2: '0', NSA_USE_FA2_WIN: '1', NSA_USE_FA2_CMP: '1' }, true],
    ['use_fa2: false', { NSA_USE_FA2_WIN: '1' }, false],
    ['fused: false', { NSA_USE_FA2_WIN: '1', NSA_USE_FA2_CMP: '1' }, true],
    ['use_flash: false', {}, false],
    ['fa2_enabled: false', { NSA_USE_FA2: '1' }, true],
    ['use_fa2_win: false', {}, false],
    ['use_fa2_win: false', { NSA_USE_FA2: '1' }, true],
    ['fused: true', { NSA_USE_FA2_CMP: '0' }, false],
  ])('%s with %j', (yaml, env, expected) => expect(fused(yaml, env)).toBe(expected));
});

describe('problems', () => {
  it.each<[string[], Record<string, string>, string]>([
    [['--steps', '0'], {}, 'train.steps: 0 is not allowed; an integer >= 1 [flag --steps]'],
    [
      ['--dataset', 'fineweb'],
      {},
      'data.source: "fineweb" is not allowed; one of synthetic, needle, stories, text, jsonl, hub',
    ],
    [[], { NSA_LR: '-1' }, 'train.lr: -1 is not allowed; a number > 0 [env NSA_LR]'],
    [[], { NSA_FORCE_BRANCH: 'wn' }, 'one of none, cmp, sel, win (did you mean win?) [env NSA_FORCE_BRANCH]'],
    [['--set', 'nsa.d=12'], {}, 'nsa.d: 12 does not divide nsa.l 32'],
    [
      ['--set', 'runtime.profile=fsat'],
      {},
      'runtime.profile: fsat: no such file and no shipped profile (did you mean fast?)',
    ],
    [
      ['--set', 'runtime.profile=loop'],
      {},
      'runtime.profile: a profile cannot name a profile [configs/profiles/loop.yaml:2:12]',
    ],
    [['--config', 'mien'], {}, 'mien: no such file and no shipped config (did you mean mine?)'],
    [['--dataset', 'jsonl'], {}, 'data.path: missing; data.source jsonl needs a path (--local-path)'],
  ])('%j %j', (argv, env, message) => expect(() => load(argv, env)).toThrow(message));

  it('names the line of the file', () => {
    write('bad', 'model:\n  dim: 8\ntrain:\n  lr_schedule: cosin\n');
    expect(() => load(['--config', 'bad'])).toThrow(
      /^train\.lr_schedule: "cosin" .*cosine\?\) \[configs\/bad\.yaml:4:16\]$/,
    );
  });

  it('says what earlier names of a file and of --set are now, a line for each, and names the first', () => {
    write(
      'old',
      'data:\n  source: fineweb_edu\n  fwe_queue: 3\nruntime:\n  profile: earlier\n  use_fa2: true\n  sdpa_audit: false\n  tb: true\n',
    );
    write('profiles/earlier', 'data:\n  fwe_prefetch: true\n');
    const { config, warnings } = load(['--config', 'old', '--set', 'data.fwe_doc_batch=9'], { NSA_USE_FA2_WIN: '1' });
    expect(config.data).toMatchObject({ source: 'hub', queue: 3, doc_batch: 9 });
    expect(warnings).toEqual([
      'configs/old.yaml: fineweb_edu is now data.source hub, data.fwe_queue is now data.queue, ' +
        'runtime.use_fa2 is now runtime.fused, and 2 more (docs/reference/legacy-names.md)',
      'profile earlier: data.fwe_prefetch is now data.prefetch (docs/reference/legacy-names.md)',
      'flag --set: data.fwe_doc_batch is now data.doc_batch (docs/reference/legacy-names.md)',
    ]);
  });

  it('says nothing about the variables and flags of the runbooks', () => {
    const env = { NSA_FWE_Q: '8', NSA_USE_FA2: '1', NSA_SDPA_AUDIT: '1' };
    expect(load(['--dataset', 'fineweb_edu'], env)).toMatchObject({
      warnings: [],
      config: { data: { source: 'hub' } },
    });
  });

  it('passes warnings on', () => expect(load([], { NSA_LRR: '1' }).warnings[0]).toContain('did you mean NSA_LR?'));
});

describe('data.path', () => {
  const at = (name: string) => join(root, 'corpora', name);
  const file = (name: string, content = 'x') => {
    mkdirSync(join(at(name), '..'), { recursive: true });
    writeFileSync(at(name), content);
  };
  file('prose/a.txt');
  file('prose/logo.png');
  file('lines/a.jsonl', '{}');
  file('lines/bootstrap.json', '{}');
  file('tables/part/a.parquet');
  file('tables/notes.md');
  file('mixed/a.jsonl.gz');
  file('mixed/b.txt');
  file('packed/a.txt.gz');
  file('shards/index.json', '{"format":"trefoil-tokens"}');
  write('synthetic', 'data:\n  source: synthetic\n');
  write('hub', 'data:\n  source: hub\n');
  write('lines', `data:\n  source: jsonl\n  path: ${at('lines')}\n`);

  it.each([
    ['prose', 'text'],
    ['prose/a.txt', 'text'],
    ['prose/*.txt', 'text'],
    ['lines', 'jsonl'],
    ['lines/*.jsonl', 'jsonl'],
    ['tables', 'files'],
    ['tables/part/a.parquet', 'files'],
    ['mixed', 'files'],
    ['packed', 'text'],
    ['shards', 'tokens'],
  ])('%s implies its source: %s', (name, source) => {
    for (const config of ['synthetic', 'hub', 'other']) {
      const { config: found, origins } = load(['--config', config, '--local-path', at(name)]);
      expect(found.data).toMatchObject({ source, path: at(name) });
      expect(origins.get('data.source')).toBe('implied by flag --local-path');
    }
    expect(load(['--set', `data.path=${at(name)}`]).config.data.source).toBe(source);
    expect(parseConfig({ data: { path: at(name) } }).data.source).toBe(source);
  });

  it('keeps a source of the config that can read the path, and replaces one that cannot', () => {
    expect(load(['--config', 'lines', '--local-path', at('prose/a.txt')]).config.data.source).toBe('jsonl');
    expect(load(['--config', 'lines', '--local-path', at('tables')]).config.data.source).toBe('files');
    expect(load(['--config', 'lines', '--local-path', at('shards')]).config.data.source).toBe('tokens');
  });

  it('is refused with a source that would ignore it', () => {
    for (const source of ['synthetic', 'needle', 'stories', 'hub'])
      expect(() => load(['--dataset', source, '--local-path', at('prose')])).toThrow(
        `data.path: not read by data.source ${source}; leave data.source (--dataset) out, or set it to one of text, ` +
          'jsonl, files, tokens, chat [flag --local-path]',
      );
  });

  it('of a config is dropped by a source of the command line that reads no path', () => {
    const { config } = load(['--config', 'lines', '--dataset', 'synthetic']);
    expect(config.data).toMatchObject({ source: 'synthetic', path: null });
  });
});

it('package: means the folder of Trefoil', () => {
  const { config } = load(['--dataset', 'text', '--local-path', 'package:docs/*.md']);
  expect(config.data.path).toBe(join(root, 'docs/*.md'));
});

describe('readConfig', () => {
  it('lays keys over a shipped config, whatever the environment says', () => {
    process.env['NSA_LR'] = '0.5';
    const config = readConfig('quickstart', { train: { steps: 7 }, data: { path: 'package:docs/*.md' } });
    delete process.env['NSA_LR'];
    expect(config).toMatchObject({ model: { dim: 96 }, data: { source: 'text' }, train: { steps: 7, lr: 3e-3 } });
    expect(config.data.path).toMatch(/^\/.*\/docs\/\*\.md$/);
  });

  it('refuses unknown and impossible keys by name', () => {
    expect(() => readConfig('quickstart', { train: { stepz: 7 } as object })).toThrow(
      'train.stepz: unknown key (did you mean steps?) [overrides]',
    );
    expect(() => readConfig('quickstart', { train: { steps: 0 } })).toThrow('train.steps: 0 is not allowed');
    expect(() => readConfig('quikstart')).toThrow('did you mean quickstart?');
  });
});

describe('readSavedConfig', () => {
  it('gives back what a run wrote, even when its profile is gone', () => {
    const { config } = load(['--config', 'mine', '--set', 'runtime.profile=slow']);
    const path = join(root, 'config.yaml');
    writeFileSync(path, toYaml({ ...config, runtime: { ...config.runtime, profile: 'gone' } }));
    expect(readSavedConfig(path)).toEqual({ ...config, runtime: { ...config.runtime, profile: 'gone' } });
  });

  it('names the file and line of a damaged one', () => {
    const path = join(root, 'config.yaml');
    writeFileSync(path, 'train:\n  lr: fast\n');
    expect(() => readSavedConfig(path)).toThrow(`train.lr: "fast" is not allowed; a number > 0 [${path}:2:7]`);
  });
});

describe('pickConfigByGpuMemory', () => {
  // Sizes that drivers report for cards sold as 16, 24, 32, 40, 48, 80, 96 and 141 GB.
  it.each([
    [15.7, '125m_24g'],
    [23.6, '125m_24g'],
    [31.8, '125m_24g'],
    [39.4, '125m_40g'],
    [47.5, '125m_40g'],
    [79.1, '125m_80g'],
    [94.9, '125m_80g'],
    [139.8, '125m_80g'],
    [null, 'quickstart'],
  ])('%s GiB: %s', (gib, name) => {
    expect(pickConfigByGpuMemory(gib)).toBe(name);
    expect(shippedConfigs()).toContain(name);
  });

  it.each([Number.NaN, -1])('refuses %s', (gib) => expect(() => pickConfigByGpuMemory(gib)).toThrow(RangeError));
});
