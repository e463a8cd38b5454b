/**
 * Number of kernels that a pass over a micro-batch launches on a GPU in bf16; independent of the batch size. A launch has a
 * cost even inside a graph, which bounds the speed of small batches. A test counts the launches of the real model. Short
 * sequences take fewer per layer of sparse attention: three of up to 36 selection blocks, one of up to 150. Counted on
 * Hopper with heads of 64; elsewhere there is one kernel less (tile-gather).
 */
import type { LayerShape, ModelShape } from '../model/shape.js';

export interface Launches {
  /** Forward: everything except the blocks, and one block. */
  readonly ends: number;
  readonly block: number;
  /** Same, for the backward pass. */
  readonly endsBackward: number;
  readonly blockBackward: number;
  /** Recomputed forward of a checkpointed block, without its last matrix product, whose result is not needed. */
  readonly blockAgain: number;
}

const DENSE: Launches = { ends: 8, block: 10, endsBackward: 13, blockBackward: 18, blockAgain: 11 };
const COUNTED: Readonly<Record<LayerShape['attention'], Launches>> = {
  nsa: { ends: 8, block: 26, endsBackward: 13, blockBackward: 29, blockAgain: 27 },
  dense: DENSE,
  window: DENSE, // the same kernels with another window
};

export function launchesOf(attention: LayerShape['attention']): Launches {
  return COUNTED[attention];
}

/** Launches of a forward and a backward pass without checkpointing. */
export function launchesOfPass(attention: ModelShape['attention'], layers: number): number {
  const { ends, block, endsBackward, blockBackward } = COUNTED[attention];
  return ends + endsBackward + layers * (block + blockBackward);
}
