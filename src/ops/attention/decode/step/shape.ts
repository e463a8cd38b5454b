/** Shapes that the kernels of a decode step support, and their compile-time macros. */
import type { CudaRuntime, KernelMacros } from '../../../../device/cuda/runtime.js';
import { type HeadShape, type SparseShape, selectionRefusal } from '../../shape.js';

export interface StepShape {
  readonly heads: HeadShape;
  /** Null for dense attention. */
  readonly sparse: SparseShape | null;
  /** When compressed keys are rotated. */
  readonly cmpRope: 'before' | 'after' | 'none';
  /** Branches whose queries and keys are rotated: all (default), or the window alone, which needs `cmpRope: none`. */
  readonly rope?: 'all' | 'window';
}

/** Columns of a piece of 16 bytes times the four lanes that share a row. */
const PIECE = 32;
const LARGEST_HEAD = 128;
const MAX_HEADS = 16;
const MAX_SELECTED = 64;
/** Compressed blocks at most that begin before a selection block and overlap it: a lane for each. */
const MAX_LEAD = 32;

/** Why these kernels do not support the shape, as a sentence; null if they do. */
export function stepRefusal({ heads, sparse }: StepShape, widths: readonly number[]): string | null {
  const { dk, dv } = heads;
  if (heads.heads / heads.groups > MAX_HEADS) return `more than ${MAX_HEADS} heads a group`;
  if (dk % PIECE !== 0 || dk > LARGEST_HEAD) return `d_k ${dk} is not a multiple of ${PIECE} up to ${LARGEST_HEAD}`;
  if (dv % 8 !== 0 || dv > LARGEST_HEAD) return `d_v ${dv} is not a multiple of 8 up to ${LARGEST_HEAD}`;
  const odd = widths.find((width) => width % PIECE !== 0);
  if (odd !== undefined) return `a layer of ${odd} inputs: not a multiple of ${PIECE}`;
  if (!sparse) return null;
  const rule = selectionRefusal(sparse);
  if (rule !== null) return rule;
  if (sparse.lSel % PIECE !== 0) return `l_sel ${sparse.lSel} is not a multiple of ${PIECE}`;
  const lead = sparse.l / sparse.d - 1;
  if (lead > MAX_LEAD) return `l ${sparse.l} is more than ${MAX_LEAD + 1} times d ${sparse.d}`;
  if (sparse.nSel > MAX_SELECTED) return `n_sel ${sparse.nSel} is more than ${MAX_SELECTED}`;
  return null;
}

export function stepMacros({ heads, sparse, cmpRope, rope }: StepShape): KernelMacros {
  const { l, d, lSel, nSel, w } = sparse ?? { l: 32, d: 16, lSel: 64, nSel: 16, w: 512 };
  return {
    HEADS: heads.heads,
    GROUPS: heads.groups,
    DK: heads.dk,
    DV: heads.dv,
    CMP_L: l,
    CMP_D: d,
    SEL_L: lSel,
    SEL_N: nSel,
    WINDOW: w,
    CMP_ROPE: { none: 0, before: 1, after: 2 }[cmpRope],
    ...(sparse && rope === 'window' ? { ROPE_WINDOW: 1 } : {}),
  };
}

/** Blocks of four warps that a multiprocessor runs at once, and shares of the keys at most (dense.cu). */
const DENSE_RESIDENT = 4;
const MAX_SPLITS = 64;

/** Number of blocks that split the keys of one (sequence, group) in dense attention. */
export function denseSplits({ heads }: StepShape, batch: number, multiprocessors: number): number {
  const wanted = Math.floor((multiprocessors * DENSE_RESIDENT) / (batch * heads.groups));
  return Math.max(1, Math.min(wanted, MAX_SPLITS));
}

/** Numbers of the partial results of dense attention. */
export function partialNumbers({ heads }: StepShape, batch: number, splits: number): number {
  return batch * (splits + 1) * (heads.heads * (2 + heads.dv) + heads.groups);
}

/** Blocks of a cluster at most, on every GPU that has clusters. */
const MAX_CLUSTER = 8;
const CLUSTER_ARCHITECTURE = 90;

/** Whether the blocks of a cluster can use each other's shared memory. */
export function hasClusters({ architecture }: CudaRuntime): boolean {
  return architecture >= CLUSTER_ARCHITECTURE;
}

/** Blocks per (sequence, group) in attention.cu: all multiprocessors are used, up to the cluster size limit. */
export function stepCluster({ heads }: StepShape, batch: number, cuda: CudaRuntime): number {
  const room = hasClusters(cuda) ? cuda.multiprocessors / (batch * heads.groups) : 1;
  return 2 ** Math.floor(Math.log2(Math.max(1, Math.min(room, MAX_CLUSTER))));
}
