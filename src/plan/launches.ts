/**
 * How many kernels a pass over a micro-batch launches on a GPU in bf16, whatever the size of the batch. A launch has its
 * price even inside a graph: a small batch cannot be faster than its launches. Counted on the real model by a test.
 */
import type { ModelShape } from '../model/shape.js';

export interface Launches {
  /** Forward: of the whole but the blocks, and of one block. */
  readonly ends: number;
  readonly block: number;
  /** Backward, the same. */
  readonly endsBackward: number;
  readonly blockBackward: number;
  /** A block's forward once more, when its activations were dropped: without its last product, whose result is not read. */
  readonly blockAgain: number;
}

const COUNTED: Readonly<Record<ModelShape['attention'], Launches>> = {
  nsa: { ends: 8, block: 25, endsBackward: 13, blockBackward: 33, blockAgain: 26 },
  dense: { ends: 8, block: 10, endsBackward: 13, blockBackward: 18, blockAgain: 11 },
};

export function launchesOf(attention: ModelShape['attention']): Launches {
  return COUNTED[attention];
}

/** Of a forward and a backward pass without checkpointing. */
export function launchesOfPass(attention: ModelShape['attention'], layers: number): number {
  const { ends, block, endsBackward, blockBackward } = COUNTED[attention];
  return ends + endsBackward + layers * (block + blockBackward);
}
