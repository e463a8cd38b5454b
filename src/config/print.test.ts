import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { parse } from 'yaml';
import { parseTrainFlags } from './flags.js';
import { configKeys } from './keys.js';
import { loadConfig } from './load.js';
import { parseConfig } from './parse.js';
import { configRows, configTable, toYaml } from './print.js';

const resolved = loadConfig({ env: { NSA_LR: '3e-4' }, flags: parseTrainFlags(['--steps', '7']).layer });

describe('configTable', () => {
  const lines = configTable(resolved).split('\n');

  it('has a row per key with value and origin', () => {
    expect(lines).toHaveLength(configKeys.length + 1);
    const row = (key: string) => lines.find((line) => line.startsWith(`${key} `))?.split(/\s{2,}/);
    expect(row('train.steps')).toEqual(['train.steps', '7', 'flag --steps']);
    expect(row('train.lr')).toEqual(['train.lr', '0.0003', 'env NSA_LR']);
    expect(row('train.betas')).toEqual(['train.betas', '[0.9,0.95]', 'default']);
    expect(row('runtime.profile')).toEqual(['runtime.profile', 'null', 'default']);
  });

  it('is aligned', () => {
    const column = lines[0].indexOf('origin');
    for (const line of lines) expect(line.slice(column - 2, column + 1), line).toMatch(/^ {2}\S/);
  });
});

it('configRows is the table as JSON', () => {
  expect(configRows(resolved).find((row) => row.key === 'train.lr')).toEqual({
    key: 'train.lr',
    value: 3e-4,
    origin: 'env NSA_LR',
  });
});

describe('toYaml', () => {
  const again = (text: string) => parseConfig(parse(text));

  it('writes every key', () => {
    const written = parse(toYaml(resolved.config)) as Record<string, Record<string, unknown>>;
    for (const { path } of configKeys) {
      const [section, name] = path.split('.');
      expect(Object.keys(written[section]), path).toContain(name);
    }
  });

  it('loads to the same config, whatever the values', () => {
    const anyConfig = fc.record({
      train: fc.record({
        out_dir: fc.string({ minLength: 1, unit: 'binary' }),
        lr: fc.double({ min: Number.MIN_VALUE, max: 1e300, noNaN: true }),
        seed: fc.nat(),
      }),
      data: fc.record({
        path: fc.option(fc.oneof(fc.string({ minLength: 1 }), fc.constantFrom('null', '1e3', 'yes', '~', '- a', '#'))),
      }),
      runtime: fc.record({ use_fa2_win: fc.option(fc.boolean()) }),
    });
    fc.assert(
      fc.property(anyConfig, (parts) => {
        const config = parseConfig(parts);
        expect(again(toYaml(config))).toEqual(config);
      }),
    );
  });
});
