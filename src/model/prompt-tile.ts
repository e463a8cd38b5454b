/**
 * A tile of a prompt on a GPU: new tokens of sequences whose earlier tokens are in the cache, computed by the fused
 * kernels of whole sequences. Those need keys and values side by side, so the cached ones are copied out of their pages.
 */
import { loadPages } from '../ops/attention/decode/paged/op.js';
import { denseRefusal, fusedDenseAttentionFrom } from '../ops/attention/fused/dense.js';
import { fusedRefusal, fusedSparseAttentionFrom } from '../ops/attention/fused/op.js';
import type { SparseOptions } from '../ops/attention/nsa.js';
import type { HeadShape, SparseShape } from '../ops/attention/shape.js';
import type { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import type { CacheStep, PageKind, WholeSequence } from './cache.js';

/** Fewer new tokens, or more cached ones for each of them, are faster from the pages. */
export const MIN_TILE_TOKENS = 64;
const MAX_CACHED_PER_TOKEN = 512;
/** Rows before the new tokens that tiles of the kernels may reach back to. */
const BEFORE = 256;

/**
 * `q` [T, H, dk] and `gates` [T, H, 3] to the output [T, H, dv] and the selected blocks [T, G, n]; null if not possible.
 * `qWin`: queries of the window branch; if they are not `q`, its own.
 */
export function sparseTile(
  tape: Tape,
  { q, qWin, gates }: Readonly<Record<'q' | 'qWin' | 'gates', Tensor>>,
  { cache, layer, heads: shape, kernels = {} }: TilePlace,
  { sharedKv, ...sparse }: SparseShape & { readonly sharedKv: boolean },
): { out: Tensor; selected: Tensor } | null {
  const { heads, groups, dk, dv } = shape;
  const problem = { heads: shape, sparse, dtype: q.dtype };
  const wholes = wholesFor(cache, ({ tokens: { sequences: tokens } }) =>
    fusedRefusal({ ...problem, tokens }, tape.device, kernels),
  );
  if (!wholes) return null;
  const total = q.shape[0];
  const out = tape.empty([total, heads, dv], 'bf16');
  const selected = tape.empty([total, groups, sparse.nSel], 'i32');
  for (const whole of wholes) {
    const { start } = whole;
    const load = (kind: PageKind, of = whole.tokens) =>
      loadPages(tape, whole.pages(kind, layer), of, { groups, dk, dv }, 'bf16');
    const [cmp, sel] = [load('cmp', whole.blocks), load('sel')];
    const win = sharedKv ? sel : load('win');
    const inputs = {
      q: placed(tape, q, whole),
      gates: placed(tape, gates, whole),
      ...(qWin !== q && { qWin: placed(tape, qWin, whole) }),
      ...{ kCmp: cmp.k, vCmp: cmp.v, kSel: sel.k, vSel: sel.v, kWin: win.k, vWin: win.v },
    };
    const all = fusedSparseAttentionFrom(tape, inputs, whole.tokens.sequences, sparse, start, kernels);
    take(out, all.out, whole);
    take(selected, all.selected, whole);
    for (const tensor of new Set([...Object.values(inputs), ...Object.values(all)])) tape.drop(tensor);
  }
  return { out, selected };
}

/** The same for a model with dense attention. */
export function denseTile(
  tape: Tape,
  q: Tensor,
  { cache, layer, heads: shape, kernels = {} }: TilePlace,
): Tensor | null {
  const { heads, groups, dk, dv } = shape;
  const problem = { heads: shape, dtype: q.dtype };
  const wholes = wholesFor(cache, ({ tokens: { sequences: tokens } }) =>
    denseRefusal({ ...problem, tokens }, tape.device, kernels),
  );
  if (!wholes) return null;
  const out = tape.empty([q.shape[0], heads, dv], 'bf16');
  for (const whole of wholes) {
    const { k, v } = loadPages(tape, whole.pages('win', layer), whole.tokens, { groups, dk, dv }, 'bf16');
    const inputs = { q: placed(tape, q, whole), k, v };
    const all = fusedDenseAttentionFrom(tape, inputs, whole.tokens.sequences, whole.start);
    take(out, all, whole);
    for (const tensor of [...Object.values(inputs), all]) tape.drop(tensor);
  }
  return out;
}

/** Where a tile is computed. */
interface TilePlace {
  readonly cache: CacheStep;
  readonly layer: number;
  readonly heads: HeadShape;
  readonly kernels?: SparseOptions | undefined;
}

/** The sequences of a step, if the fused kernels can take each of them and are the faster way. */
function wholesFor(
  cache: CacheStep,
  refusal: (whole: WholeSequence) => string | null,
): readonly WholeSequence[] | null {
  const { total, device } = cache.tokens.sequences;
  if (device.kind !== 'cuda') return null;
  const wholes = cache.wholes();
  const cached = wholes.reduce((sum, { start }) => sum + start, 0);
  if (cached > total * MAX_CACHED_PER_TOKEN || wholes.some((whole) => refusal(whole) !== null)) return null;
  return wholes;
}

/** Rows of the new tokens at their places in the whole sequence; what is before them is not used, but must be finite. */
function placed(tape: Tape, x: Tensor, { tokens, start, first }: WholeSequence): Tensor {
  const [, ...row] = x.shape;
  const { total } = tokens.sequences;
  const all = tape.empty([total, ...row], x.dtype);
  if (start > 0) all.rows(Math.max(0, start - BEFORE), start).zero();
  all.rows(start, total).copyFrom(x.rows(first, first + total - start));
  return all;
}

/** Copies the rows of the new tokens. */
function take(to: Tensor, all: Tensor, { tokens, start, first }: WholeSequence): void {
  const { total } = tokens.sequences;
  to.rows(first, first + total - start).copyFrom(all.rows(start, total));
}
