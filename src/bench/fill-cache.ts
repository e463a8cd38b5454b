/** A cache that looks as if sequences of some length had been read. */
import type { CachedSequence, DecodeCache } from '../model/cache.js';
import { headShapeOf } from '../model/shape.js';
import { type NewTokens, storePages } from '../ops/attention/decode/paged/op.js';
import { castInto } from '../ops/cast/op.js';
import { fillNormal } from '../tensor/random/op.js';
import { Tensor } from '../tensor/tensor.js';

/** Random keys and values in place of a prefill, which would take much longer than what is measured. */
export function fillCache(cache: DecodeCache, sequences: readonly CachedSequence[], length: number): void {
  const { device, shape, dtype } = cache;
  const { groups, dk, dv } = headShapeOf(shape);
  let stream = 0;
  const random = (rows: number, size: number) => {
    const tensor = Tensor.empty(device, [rows, groups, size]);
    stream += 1;
    fillNormal(tensor, { seed: 1, stream });
    if (dtype === 'f32') return tensor;
    const rounded = Tensor.empty(device, tensor.shape, dtype);
    castInto(device, tensor, rounded);
    tensor.free();
    return rounded;
  };
  const step = cache.begin(
    sequences,
    sequences.map(() => length),
  );
  const fill = (kind: 'sel' | 'win' | 'cmp', layer: number, tokens: NewTokens) => {
    const [k, v] = [random(tokens.sequences.total, dk), random(tokens.sequences.total, dv)];
    storePages(device, k, v, step.pages(kind, layer), tokens);
    k.free();
    v.free();
  };
  for (let layer = 0; layer < shape.nLayers; layer++) {
    fill('win', layer, step.tokens);
    if (shape.attention === 'dense') continue;
    fill('sel', layer, step.tokens);
    fill('cmp', layer, step.blocks);
  }
  step.commit();
  step.free();
}
