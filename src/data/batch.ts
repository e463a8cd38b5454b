/** Packs samples into the arrays that a model takes. */

import type { SampleAddress, Samples } from './shards/samples.js';

/** A target that does not count for the loss. */
export const IGNORED_TARGET = -100;

/** Token ids, targets and sequence boundaries of one batch, on the host. */
export interface Batch {
  /** [batch * sequence], row after row. */
  readonly inputs: Int32Array;
  /** The token after each input, or IGNORED_TARGET. */
  readonly targets: Int32Array;
  /** Number of targets that count: the weight of this batch in a mean over several. */
  readonly targetCount: number;
  /** Starts of the sequences that attention treats separately: 0, S, 2S … and with document masks each document start. */
  readonly cuSeqlens: Int32Array;
  /** Identifies the data of each row, for diagnosis. */
  readonly sampleIds: number[];
  /** Of the first row. */
  readonly epoch: number;
}

export interface Packing {
  readonly sequenceLength: number;
  /** Documents of a row are masked from each other, and the first token of a document is not a target. */
  readonly documentMask: boolean;
}

/**
 * One row per address. Rows from `counted` on are padding: all their targets are ignored, so that every batch has the same
 * shape and no sample counts twice.
 */
export function packBatch(
  samples: Samples,
  addresses: readonly SampleAddress[],
  { sequenceLength, documentMask }: Packing,
  counted = addresses.length,
): Batch {
  const rows = addresses.length;
  const inputs = new Int32Array(rows * sequenceLength);
  const targets = new Int32Array(rows * sequenceLength);
  const window = new Int32Array(sequenceLength + 1);
  const boundaries: number[] = [];
  for (const [row, address] of addresses.entries()) {
    const start = row * sequenceLength;
    samples.read(address, window);
    inputs.set(window.subarray(0, sequenceLength), start);
    targets.set(window.subarray(1), start);
    samples.maskTargets?.(address, targets.subarray(start, start + sequenceLength));
    boundaries.push(start);
    if (!documentMask) continue;
    for (const offset of samples.documentStarts(address)) {
      if (offset === 0) continue;
      if (offset < sequenceLength) boundaries.push(start + offset);
      targets[start + offset - 1] = IGNORED_TARGET;
    }
  }
  targets.fill(IGNORED_TARGET, counted * sequenceLength);
  boundaries.push(rows * sequenceLength);
  let ignored = 0;
  for (const target of targets) if (target === IGNORED_TARGET) ignored++;
  return {
    inputs,
    targets,
    targetCount: rows * sequenceLength - ignored,
    cuSeqlens: Int32Array.from(boundaries),
    sampleIds: addresses.map((address) => address.id),
    epoch: addresses[0].epoch,
  };
}
