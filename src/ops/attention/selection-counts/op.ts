/** How many (token, group) rows selected 0, 1, … n blocks: a histogram of n + 1 counts for telemetry. */
import { type Device, defineKernels } from '../../../device/device.js';
import { Tensor } from '../../../tensor/tensor.js';
import { expectShape } from '../../common/shapes.js';
import { launchers } from './cuda.js';

export const signatures = { selection_counts: ['ptr', 'ptr', 'i64', 'i64'] } as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** Statistics of selected blocks. */
export interface SelectionStatistics {
  /** Selected blocks per (token, group). */
  readonly mean: number;
  readonly max: number;
  /** Share of them with the largest number, in percent. */
  readonly percentAtMax: number;
}

/** `selected` i32 [T, G, n] -> i32 [n + 1], which the caller frees. */
export function selectionCounts(device: Device, selected: Tensor): Tensor {
  const [tokens, groups, slots] = expectShape('selectionCounts: selected', selected, [-1, -1, -1], 'i32');
  const counts = Tensor.zeros(device, [slots + 1], 'i32');
  device.kernels(kernels).selection_counts(selected, counts, tokens * groups, slots);
  return counts;
}

export function summarizeSelection(counts: ArrayLike<number>): SelectionStatistics {
  let [rows, total, max] = [0, 0, 0];
  for (let blocks = 0; blocks < counts.length; blocks++) {
    rows += counts[blocks];
    total += blocks * counts[blocks];
    if (counts[blocks] > 0) max = blocks;
  }
  if (rows === 0) return { mean: 0, max: 0, percentAtMax: 0 };
  return { mean: total / rows, max, percentAtMax: (100 * counts[max]) / rows };
}
