/** Native Sparse Attention of new tokens over a cache that already holds their keys and values. */
import { combine } from '../ops/attention/combine/op.js';
import { pagedCompressed, pagedSelected, pagedWindow } from '../ops/attention/decode/paged/op.js';
import type { SparseOutputs } from '../ops/attention/nsa.js';
import type { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import type { CacheStep } from './cache.js';
import { headShapeOf, type ModelShape, sparseShapeOf } from './shape.js';

/** Keys each branch read, i32 [T, G]. */
export interface BranchReads {
  readonly cmp: Tensor;
  readonly sel: Tensor;
  readonly win: Tensor;
}

export function cachedSparseAttention(
  tape: Tape,
  q: Tensor,
  gates: Tensor,
  cache: CacheStep,
  layer: number,
  shape: ModelShape,
  reads: BranchReads | null = null,
): SparseOutputs {
  const { tokens } = cache;
  const [heads, sparse] = [headShapeOf(shape), sparseShapeOf(shape)];
  const cmp = pagedCompressed(tape, q, cache.pages('cmp', layer), tokens, heads, sparse, reads?.cmp);
  const { selected } = cmp;
  const sel = pagedSelected(tape, q, selected, cache.pages('sel', layer), tokens, heads, reads?.sel);
  const win = pagedWindow(tape, q, cache.pages('win', layer), tokens, heads, sparse.w, reads?.win);
  const out = combine(tape, gates, cmp.out, sel.out, win.out);
  for (const { lse } of [cmp, sel, win]) tape.drop(lse);
  return { out, oCmp: cmp.out, oSel: sel.out, oWin: win.out, selected };
}
