/**
 * Memory of the fused attention kernels for a batch, without a GPU: the sizes that forward.ts and backward.ts
 * allocate.
 */
import type { SelectedPath } from './forward.js';
import {
  type FusedBuild,
  type FusedShape,
  gatherRefusal,
  hasJoint,
  mayUseOuter,
  packedTileBytes,
  planBatch,
  querySumRows,
  selectedLimits,
  sharedLimit,
  unionTokens,
} from './plan.js';
import { partRows } from './scorer.js';

const BF16 = 2;
const FLOAT = 4;
const INT = 4;
const BUILD = { queryMajor: false, mmaSync: false };

export interface FusedBytes {
  /**
   * From the forward to the backward pass, beside inputs, outputs, log-sum-exps and selections: the lists of tokens
   * per block.
   */
  readonly kept: number;
  /** Bytes that a checkpointed block keeps of long sequences: `Ranked` in forward.ts. */
  readonly ranked: number;
  /** While the forward pass runs, and while the backward pass does. */
  readonly forward: number;
  readonly backward: number;
}

export function fusedBytes(
  lengths: readonly number[],
  shape: FusedShape,
  options: { readonly path: SelectedPath; readonly deterministic: boolean } & Pick<
    FusedBuild,
    'windowApart' | 'scored'
  >,
): FusedBytes {
  const { heads, groups, dk, dv } = shape.heads;
  const { nSel, lSel } = shape.sparse;
  const plan = planBatch(lengths, shape);
  const rows = plan.tokens * heads;
  const packed = packedTileBytes(shape.heads);
  const window = packed * plan.tokenTiles(64);
  const compressedAndWindow = packed * plan.compressedTiles + window;
  const lists = INT * (plan.choices + 3 * plan.lists * plan.stretches + 2 * plan.lists + 2 * plan.forwardItems);
  const inTile = unionTokens(shape, BUILD, sharedLimit(90));
  const limits = selectedLimits(shape, inTile, gatherRefusal(shape, BUILD, 90, plan.longest) === null);
  const partial = !mayUseOuter(options.path, shape, limits, plan.longest) ? 0 : plan.partialRows * (BF16 * dv + FLOAT);
  const keys = plan.compressed * groups;
  const parts = Math.max(plan.compressedChunks * keys, plan.backwardItems * lSel);
  const sums = FLOAT * (dk + dv) * (options.deterministic ? parts : keys + plan.tokens * groups);
  // As on a GPU that has the kernel; elsewhere it is a little less.
  const joint = !options.deterministic && hasJoint(shape, BUILD, 90);
  const querySums = joint ? FLOAT * querySumRows(plan, shape) * dk : 0;
  // Two numbers of each slot and head, and a loss; the other buffers of the forward pass are free by then.
  const scorer = options.scored ? FLOAT * (2 * rows * nSel + plan.tokens * groups) : 0;
  const scorerParts = options.scored ? FLOAT * dk * partRows({ plan, shape }) : 0;
  return {
    kept: INT * (plan.choices + 2 * (plan.lists + 1) + 2 * plan.backwardItems),
    ranked: rows * (BF16 * dv + FLOAT) + INT * (2 * plan.choices + plan.lists * plan.stretches),
    forward: Math.max(compressedAndWindow + packed * plan.blocks + lists + partial, scorer),
    // Two numbers of each branch for a row, and the queries' gradient of the selected branch by slot.
    backward:
      (joint ? querySums + (options.windowApart ? window : 0) : compressedAndWindow) +
      FLOAT * 6 * rows +
      BF16 * rows * dk * nSel +
      sums +
      scorerParts,
  };
}
