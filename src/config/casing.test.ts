import { describe, expect, expectTypeOf, it } from 'vitest';
import { type CamelCase, type CamelKeys, snakeKeys } from './casing.js';
import { configKeys } from './keys.js';
import type { Config } from './schema.js';

describe('snakeKeys', () => {
  it('leads back from the option to the key, for every key of a config', () => {
    for (const { path } of configKeys) {
      const name = path.split('.')[1];
      const option = name.replace(/_(\w)/g, (_, letter: string) => letter.toUpperCase());
      expect(snakeKeys({ [option]: 1 })).toEqual({ [name]: 1 });
    }
  });

  it('refuses the key of a file with the name of the option', () => {
    expect(() => snakeKeys({ n_kv_groups: 2 })).toThrow('n_kv_groups: unknown option; in a program it is nKvGroups');
  });
});

it('types follow', () => {
  expectTypeOf<CamelCase<'n_kv_groups' | 'd_k' | 'dim'>>().toEqualTypeOf<'nKvGroups' | 'dK' | 'dim'>();
  expectTypeOf<CamelKeys<Config['data']>['valFraction']>().toEqualTypeOf<number>();
});
