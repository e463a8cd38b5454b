import { describe, expect, expectTypeOf, it } from 'vitest';
import type { z } from 'zod';
import { type Config, type ConfigInput, configSchema } from './schema.js';

const parse = (input: unknown) => configSchema.safeParse(input).success;

describe('the schema', () => {
  it('needs no key: the defaults are the 125m shape', () => {
    const { model, nsa, runtime, train } = configSchema.parse({});
    expect(model).toMatchObject({ dim: 768, n_layers: 12, n_heads: 12, n_kv_groups: 2, d_k: 64, d_v: 64 });
    expect(nsa).toMatchObject({ l: 32, d: 16, l_sel: 64, n_sel: 16, w: 512, phi: 'avg', cmp_rope: 'after' });
    expect(nsa).toMatchObject({ gate: 'softmax', gate_temp: 1, force_branch: 'none' });
    expect(model).toMatchObject({ rope_theta: 10000, rope_scale: 1, attention: 'nsa' });
    expect(runtime).toMatchObject({ selection_kernel: 'adaptive', selection_v2_min_len: 1024, device: 'auto' });
    expect(train).toMatchObject({ lr_schedule: 'cosine', ddp: -1, betas: [0.9, 0.95] });
  });

  it('has the types of the sections', () => {
    expectTypeOf<Config>().toEqualTypeOf<z.infer<typeof configSchema>>();
    expectTypeOf<z.input<typeof configSchema>>().toExtend<ConfigInput>();
  });

  it('gives every call its own object, so that no caller can change the defaults of another', () => {
    const first = configSchema.parse({});
    first.train.betas[0] = 0.5;
    first.model.dim = 1;
    expect(configSchema.parse({})).toMatchObject({ train: { betas: [0.9, 0.95] }, model: { dim: 768 } });
  });

  it('knows no other key and no other section', () => {
    expect(parse({ train: { stepz: 1 } })).toBe(false);
    expect(parse({ trian: {} })).toBe(false);
    expect(parse({ model: { constructor: 1 } })).toBe(false);
  });

  it.each([
    ['text for a number', { train: { lr: '3e-4' } }],
    ['a fraction for a count', { train: { steps: 1.5 } }],
    ['infinity', { train: { lr: Number.POSITIVE_INFINITY } }],
    ['not a number', { train: { lr: Number.NaN } }],
    ['no steps', { train: { steps: 0 } }],
    ['a moment that never forgets', { train: { betas: [0.9, 1] } }],
    ['one moment', { train: { betas: [0.9] } }],
    ['half precision that the kernels lack', { runtime: { precision: 'fp16' } }],
    ['fewer selected blocks than forced ones', { nsa: { n_sel: 2 } }],
    ['a rank mode of 2', { train: { ddp: 2 } }],
    ['an empty folder name', { train: { out_dir: '' } }],
    ['null where a value must be', { train: { lr: null } }],
  ])('refuses %s', (_, input) => expect(parse(input)).toBe(false));

  it('takes null where a key may stay open', () => {
    expect(parse({ data: { path: null, seed: null }, runtime: { threads: null } })).toBe(true);
  });

  it('checks the rules between keys too', () => {
    expect(parse({ nsa: { d: 12 } })).toBe(false);
  });
});
