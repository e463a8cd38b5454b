/** The memory of a decode cache by its definition, for tests. */
import type { Device } from '../device/device.js';
import { DecodeCache, type KindLayout, type PageKind } from '../model/cache.js';
import type { ComputeDtype, ModelShape } from '../model/shape.js';
import { compressedCount } from '../ops/common/sequences.js';
import { DTYPE_BYTES } from '../tensor/tensor.js';

/** Bytes of the pages of one sequence of `length` tokens. */
export function cacheBytes(shape: ModelShape, device: Device, length: number, dtype: ComputeDtype = 'f32'): number {
  if (length === 0) return 0;
  const { l, d, w } = shape.nsa;
  const [, , ...kinds] = new DecodeCache(device, shape, dtype).layout as [
    unknown,
    unknown,
    ...[PageKind, KindLayout][],
  ];
  const firstKept = shape.attention === 'dense' ? 0 : Math.max(0, length - w + 1);
  let numbers = 0;
  for (const [kind, { size, numbers: perLayer, layers }] of kinds) {
    const upTo = (count: number) => Math.ceil(count / size);
    const counts: Record<PageKind, number> = {
      sel: upTo(length),
      win: upTo(length) - Math.min(Math.floor(firstKept / size), upTo(length)),
      cmp: upTo(compressedCount(length, l, d)),
      tail: 1,
    };
    numbers += counts[kind] * perLayer * layers.length;
  }
  return numbers * DTYPE_BYTES[dtype];
}
