import { describe, expect, it } from 'vitest';
import { configKeys, configSections, findKey, keysOf } from './keys.js';
import { configSchema } from './schema.js';

describe('the table of keys', () => {
  it('has every key of the schema, in its order', () => {
    const whole = configSchema.parse({}) as Record<string, Record<string, unknown>>;
    const paths = Object.entries(whole).flatMap(([section, keys]) =>
      Object.keys(keys).map((name) => `${section}.${name}`),
    );
    expect(configKeys.map((key) => key.path)).toEqual(paths);
    expect(configSections).toEqual(['model', 'nsa', 'data', 'runtime', 'train']);
  });

  it('has the defaults of the schema', () => {
    const whole = configSchema.parse({}) as Record<string, Record<string, unknown>>;
    for (const key of configKeys) {
      const [section, name] = key.path.split('.');
      expect(key.default, key.path).toEqual(whole[section][name]);
    }
  });

  it.each([
    ['train.lr', 'number', 'a number > 0'],
    ['train.steps', 'integer', 'an integer >= 1'],
    ['train.lr_min_ratio', 'number', 'a number >= 0 and <= 1'],
    ['data.val_fraction', 'number', 'a number >= 0 and < 1'],
    ['train.lr_schedule', 'choice', 'one of cosine, wsd, linear, constant'],
    ['train.ddp', 'choice', 'one of -1, 0, 1'],
    ['model.layer_pattern', 'list', 'a list of 1 or more, each one of nsa, window'],
    ['train.betas', 'list', 'a list of 2, each a number >= 0 and < 1'],
    ['runtime.tensorboard', 'boolean', 'true or false'],
    ['runtime.threads', 'integer', 'an integer >= 1, or null'],
    ['runtime.threads', 'integer', 'an integer >= 1, or null'],
    ['data.path', 'text', 'a non-empty text, or null'],
  ])('%s is of kind %s: %s', (path, kind, allowed) => expect(findKey(path)).toMatchObject({ kind, allowed }));

  it('knows only its own names', () => {
    expect(findKey('train.stepz')).toBeUndefined();
    expect(keysOf('nsa')).toContain('l_sel');
    expect(keysOf('nsa')).not.toContain('dim');
  });
});
