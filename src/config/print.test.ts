import { describe, expect, it } from 'vitest';
import { parse } from 'yaml';
import { parseTrainFlags } from '../cli/shared/train-flags.js';
import fc from '../testing/properties.js';
import { configKeys } from './keys.js';
import { loadConfig } from './load.js';
import { parseConfig } from './parse.js';
import { configRows, toYaml } from './print.js';

const resolved = loadConfig({ env: { NSA_LR: '3e-4' }, flags: parseTrainFlags(['--steps', '7']).layer });

it('configRows has every key with its value and origin', () => {
  expect(configRows(resolved).map(({ key }) => key)).toEqual(configKeys.map(({ path }) => path));
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
      runtime: fc.record({ profile: fc.option(fc.constantFrom('cpu', 'h200')) }),
    });
    fc.assert(
      fc.property(anyConfig, (parts) => {
        const config = parseConfig(parts);
        expect(again(toYaml(config))).toEqual(config);
      }),
    );
  });
});
