/**
 * A sample of the selected blocks of a layer: pairs of neighbouring tokens, evenly spread over the batch. Statistics of the
 * selection are computed on the host from it, so that a step copies a few kilobytes instead of all selections.
 */
import { type Device, defineKernels } from '../../../device/device.js';
import { Tensor } from '../../../tensor/tensor.js';
import { expectShape } from '../../common/shapes.js';
import { launchers } from './cuda.js';

export const signatures = { selection_sample: ['ptr', 'ptr', 'i64', 'i64', 'i64'] } as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** The second token of pair `pair` of `pairs` among `tokens`. */
export function sampledToken(pair: number, pairs: number, tokens: number): number {
  return 1 + Math.floor((pair * (tokens - 1)) / pairs);
}

/** `selected` i32 [T, G, n] → i32 [pairs, 2, G, n], which the caller frees; fewer pairs if T is small. */
export function sampleSelection(device: Device, selected: Tensor, most: number): Tensor {
  const [tokens, groups, slots] = expectShape('sampleSelection: selected', selected, [-1, -1, -1], 'i32');
  const pairs = Math.max(0, Math.min(most, tokens - 1));
  const sample = Tensor.empty(device, [pairs, 2, groups, slots], 'i32');
  if (pairs > 0) device.kernels(kernels).selection_sample(selected, sample, tokens, groups * slots, pairs);
  return sample;
}
