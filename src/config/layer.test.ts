import { describe, expect, it } from 'vitest';
import { LayerBuilder, layerOfTree } from './layer.js';

const layer = (tree: unknown) => layerOfTree(tree, 'x.yaml', (path) => `x.yaml at ${path.join('.')}`);

describe('layerOfTree', () => {
  it('has a setting per key, with its origin and place', () => {
    expect([...layer({ train: { lr: 1, betas: [0, 0] } })]).toEqual([
      ['train.lr', { value: 1, origin: 'x.yaml', where: 'x.yaml at train.lr' }],
      ['train.betas', { value: [0, 0], origin: 'x.yaml', where: 'x.yaml at train.betas' }],
    ]);
  });

  it.each([[null], [undefined], [{}], [{ train: null }]])('%j sets nothing', (tree) =>
    expect(layer(tree).size).toBe(0),
  );

  it.each([
    [[1], 'config: not a mapping; sections model, nsa, data, runtime, train [x.yaml]'],
    [{ train: [1] }, 'train: [1] is not allowed; keys such as steps, seq_len, batch_size [x.yaml at train]'],
    [{ train: { stepz: 1 } }, 'train.stepz: unknown key (did you mean steps?) [x.yaml at train.stepz]'],
    [
      { nsaa: {} },
      'nsaa: unknown section; one of model, nsa, data, runtime, train (did you mean nsa?) [x.yaml at nsaa]',
    ],
    [
      { runtime: { use_triton_sel: true } },
      'runtime.use_triton_sel: Triton is not used; set runtime.selection_kernel [x.yaml at runtime.use_triton_sel]',
    ],
    [
      { runtime: { fused: true, use_fa2: false } },
      'runtime.use_fa2: contradicts runtime.fused, which sets the same key [x.yaml at runtime.use_fa2]',
    ],
  ])('%j is refused', (tree, message) => expect(() => layer(tree)).toThrow(message));

  it('names every unknown key in one error', () => {
    expect(() => layer({ train: { aa1: 1, bb2: 1 } })).toThrow(/aa1.*\n.*bb2/);
  });

  it('takes two names of a key that agree', () => {
    expect(layer({ runtime: { use_flash: false, fa2_enabled: false } }).get('runtime.fused')?.value).toBe(false);
  });

  it('is not fooled by keys of Object', () => {
    const tree = JSON.parse('{"__proto__": {"dim": 1}, "model": {"__proto__": {"dim": 2}}}');
    expect(() => layer(tree)).toThrow(/__proto__: unknown section/);
    expect(({} as Record<string, unknown>)['dim']).toBeUndefined();
  });
});

describe('LayerBuilder', () => {
  it('lets the later setting win', () => {
    const builder = new LayerBuilder();
    builder.set('train.lr', 1, 'first');
    builder.set('train.lr', 2, 'second');
    expect(builder.build().get('train.lr')).toEqual({ value: 2, origin: 'second', where: 'second' });
  });
});
