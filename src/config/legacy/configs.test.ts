import { describe, expect, it } from 'vitest';
import { findConfig, readLayer } from '../files.js';
import { findKey } from '../keys.js';
import { loadConfig } from '../load.js';
import { shippedConfigs } from '../shipped.js';
import { oldConfigs } from './configs.js';

const load = (config: string) => loadConfig({ env: {}, config });

describe.each(oldConfigs)('$name', ({ name, config, sets }) => {
  it('is a shipped config, with keys that exist', () => {
    expect(shippedConfigs()).toContain(config);
    expect(shippedConfigs()).not.toContain(name);
    for (const key of Object.keys(sets)) expect(findKey(key), key).toBeDefined();
  });

  it.each([name, `configs/${name}.yaml`, `./configs/${name}.yaml`])('loads as %s and says so in one line', (typed) => {
    const { config: found, file, warnings } = load(typed);
    const present = load(config).config;
    expect(file).toBe(`configs/${config}.yaml`);
    expect(warnings).toHaveLength(1);
    expect(warnings[0]).toContain(`${name} is now configs/${config}.yaml`);
    const changed = Object.keys(sets).map((key) => key.split('.')[1]);
    const expected = { ...present.train, ...Object.fromEntries(changed.map((key) => [key, sets[`train.${key}`]])) };
    expect(found).toEqual({ ...present, train: expected });
  });
});

it('the folder of the earlier file is that of the run, unless it is given', () => {
  expect(load('m7c_125m_80g').config.train.out_dir).toBe('artifacts/m7c_125m');
  expect(load('125m_80g').config.train.out_dir).toBe('artifacts/125m');
  expect(loadConfig({ env: { CONFIG: 'configs/runbook_s512.yaml', NSA_SEQ_LEN: '256' } }).config.train).toMatchObject({
    seq_len: 256,
    batch_size: 2,
    out_dir: 'artifacts/runbook_s512',
  });
  expect(readLayer(findConfig('runbook_s512')).get('train.seq_len')).toEqual({
    value: 512,
    origin: 'runbook_s512',
    where: 'runbook_s512',
  });
});

it('profiles and present names are left alone', () => {
  expect(() => findConfig('m7c_125m_80g', 'configs/profiles')).toThrow('no shipped profile');
  expect(findConfig('base')).not.toHaveProperty('earlier');
});
