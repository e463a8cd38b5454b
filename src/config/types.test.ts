import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, expectTypeOf, it } from 'vitest';
import type { z } from 'zod';
import type { configShape } from './schema.js';
import { configTypes } from './testing/types.js';
import type { Config, ConfigInput } from './types.js';

const path = join(import.meta.dirname, 'types.ts');

describe('the types of a config', () => {
  it('are those that the schema gives', () => {
    if (process.env['TREFOIL_UPDATE_TYPES']) writeFileSync(path, configTypes());
    const squeeze = (source: string) => source.replace(/\s+/g, ' ');
    expect(squeeze(readFileSync(path, 'utf8'))).toBe(squeeze(configTypes()));
  });

  it('agree with what zod infers', () => {
    expectTypeOf<Config>().toEqualTypeOf<z.infer<typeof configShape>>();
    expectTypeOf<z.input<typeof configShape>>().toExtend<ConfigInput>();
  });

  it('have a comment on every key', () => {
    const lines = readFileSync(path, 'utf8').split('\n');
    const bare = lines.filter((line, i) => /^ {2}\w+: /.test(line) && !lines[i - 1].includes('*/'));
    expect(bare).toEqual([]);
    expect(lines.filter((line) => line.includes('Default: `undefined`'))).toEqual([]);
  });
});
