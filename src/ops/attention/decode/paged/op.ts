/**
 * Attention of new tokens over cached keys and values that lie in pages (decode, and prefill in tiles).
 *
 * A page holds one block of keys and values of every layer; a sequence's table names its pages in order. On the CPU the
 * blocks are those of the kernels over whole sequences, so a token's output is bit for bit what a prefill would have
 * given it; on CUDA it is the same within rounding.
 */
import { type Device, defineKernels } from '../../../../device/device.js';
import type { Tape } from '../../../../tensor/tape.js';
import { Tensor } from '../../../../tensor/tensor.js';
import type { Sequences } from '../../../common/sequences.js';
import { expectFloats, expectShape } from '../../../common/shapes.js';
import { SELECTION_SIGNATURE, selectionArguments } from '../../select/op.js';
import { type HeadShape, type SparseShape, validateShapes } from '../../shape.js';
import { CUDA_PAGE, launchers } from './cuda.js';

const pages = ['ptr', 'i64', 'i64'] as const; // see pageArguments
const tokens = ['ptr', 'ptr', 'i64'] as const; // see tokenArguments
const heads = ['i64', 'i64', 'i64', 'i64'] as const;
const attention = [...(['ptr', 'ptr', 'ptr', 'ptr'] as const), ...pages, ...tokens, ...heads] as const;
export const signatures = {
  paged_store: ['ptr', 'ptr', ...pages, ...tokens, ...heads],
  paged_load: ['ptr', 'ptr', ...pages, ...tokens, ...heads],
  paged_join: ['ptr', 'ptr', 'ptr', ...pages, ...tokens, 'i64'],
  paged_keep: ['ptr', 'ptr', 'ptr', ...pages, ...tokens, 'i64'],
  paged_window: [...attention, 'i64'],
  paged_compressed: ['ptr', ...attention, ...SELECTION_SIGNATURE],
  paged_selected: ['ptr', ...attention, 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });
/** The page layout depends on the processor's vector width; all GPUs share one layout. */
const cpuSizes = defineKernels(import.meta.url, { paged_sizes: ['ptr'] });

/** One layer's part of the pages of one kind. */
export interface Pages {
  /** [sequences]: the sequences' tables of pages. */
  readonly tables: Tensor<'address'>;
  /** Where the layer begins in a page, in numbers. */
  readonly place: number;
  /** Keys of a page. */
  readonly size: number;
}

/** New tokens of several sequences, and the position (i32 [sequences]) of the first of each. */
export interface NewTokens {
  readonly sequences: Sequences;
  readonly starts: Tensor;
}

/** Keys of a block of the attention kernels, and the numbers a row of floats is padded to a multiple of. */
export interface PageSizes {
  readonly block: number;
  readonly lanes: number;
}

export function pageSizes(device: Device): PageSizes {
  if (device.kind === 'cuda') return { block: CUDA_PAGE, lanes: 1 };
  const sizes = Tensor.empty(device, [2], 'i32');
  device.kernels(cpuSizes).paged_sizes(sizes);
  const [block, lanes] = sizes.read();
  sizes.free();
  return { block, lanes };
}

/**
 * Numbers of one layer in a page of `size` keys. CPU: keys as columns, values as rows, both padded to whole vectors.
 * CUDA: keys as rows, values as columns.
 */
export function pageNumbers({ groups, dk, dv }: HeadShape, size: number, lanes: number): number {
  const padded = (count: number) => Math.ceil(count / lanes) * lanes;
  return groups * (dk * padded(size) + size * padded(dv));
}

/** Writes `k` [T, G, dk] and `v` [T, G, dv] into the pages; tokens whose page is missing are passed over. */
export function storePages(device: Device, k: Tensor, v: Tensor, into: Pages, tokens: NewTokens): void {
  const [, groups, dk] = expectFloats('storePages: k', k, [tokens.sequences.total, -1, -1]);
  const [, , dv] = expectShape('storePages: v', v, [tokens.sequences.total, groups, -1], k.dtype);
  const shape = [groups, groups, dk, dv] as const;
  device.kernels(kernels).paged_store(k, v, ...pageArguments(into), ...tokenArguments(tokens), ...shape);
}

/** Keys [T, G, dk] and values [T, G, dv] of `tokens` out of the pages; zeros where a page is missing. */
export function loadPages(
  tape: Tape,
  from: Pages,
  tokens: NewTokens,
  { groups, dk, dv }: Omit<HeadShape, 'heads'>,
  dtype: 'f32' | 'bf16',
): { k: Tensor; v: Tensor } {
  const k = tape.empty([tokens.sequences.total, groups, dk], dtype);
  const v = tape.empty([tokens.sequences.total, groups, dv], dtype);
  const shape = [groups, groups, dk, dv] as const;
  tape.device.kernels(kernels).paged_load(k, v, ...pageArguments(from), ...tokenArguments(tokens), ...shape);
  return { k, v };
}

/** The rows kept of each sequence and then its new rows `x` [T, ...], laid out as `joined`. */
export function joinTail(tape: Tape, x: Tensor, tail: Pages, tokens: NewTokens, joined: Sequences): Tensor {
  const [, ...rest] = x.shape;
  const out = tape.empty([joined.total, ...rest], x.dtype);
  tape.device
    .kernels(kernels)
    .paged_join(x, out, joined.offsets, ...pageArguments(tail), ...tokenArguments(tokens), rowSize(x));
  return out;
}

/** Keeps each sequence's rows from `done` (i32 [sequences]) on. */
export function keepTail(
  device: Device,
  rows: Tensor,
  joined: Sequences,
  done: Tensor,
  tail: Pages,
  tokens: NewTokens,
): void {
  device
    .kernels(kernels)
    .paged_keep(rows, joined.offsets, done, ...pageArguments(tail), ...tokenArguments(tokens), rowSize(rows));
}

export interface PagedOutput {
  /** [T, H, dv] */
  readonly out: Tensor;
  /** [T, H] */
  readonly lse: Tensor;
}

/** Keys that were really read by each (token, group): i32 [T, G], filled where given. */
export type Reads = Tensor | null;

/** `q` [T, H, dk] over the last `w` keys; Infinity = all of them, dense attention. */
export function pagedWindow(
  tape: Tape,
  q: Tensor,
  from: Pages,
  tokens: NewTokens,
  shape: HeadShape,
  w: number,
  reads: Reads = null,
): PagedOutput {
  const { out, lse } = outputs(tape, q, tokens, shape);
  const most = Number.isFinite(w) ? w : Number.MAX_SAFE_INTEGER;
  tape.device.kernels(kernels).paged_window(q, out, lse, reads, ...where(from, tokens, shape), most);
  return { out, lse };
}

export interface PagedSelection extends PagedOutput {
  /** The blocks each (token, group) attends to, i32 [T, G, n_sel]: exactly those `selectBlocks` gives. */
  readonly selected: Tensor;
}

/** `q` over the compressed keys, and the blocks that their scores select. */
export function pagedCompressed(
  tape: Tape,
  q: Tensor,
  from: Pages,
  tokens: NewTokens,
  shape: HeadShape,
  sparse: SparseShape,
  reads: Reads = null,
): PagedSelection {
  const { out, lse } = outputs(tape, q, tokens, shape);
  const selected = tape.empty([tokens.sequences.total, shape.groups, sparse.nSel], 'i32');
  const kernel = tape.device.kernels(kernels);
  const rule = selectionArguments(sparse);
  kernel.paged_compressed(q, out, lse, reads, selected, ...where(from, tokens, shape), ...rule);
  return { out, lse, selected };
}

/** Pages of one selection block each. */
export function pagedSelected(
  tape: Tape,
  q: Tensor,
  selected: Tensor,
  from: Pages,
  tokens: NewTokens,
  shape: HeadShape,
  reads: Reads = null,
): PagedOutput {
  const { out, lse } = outputs(tape, q, tokens, shape);
  const [, , nSel] = expectShape('pagedSelected: selected', selected, [q.shape[0], shape.groups, -1], 'i32');
  tape.device.kernels(kernels).paged_selected(q, selected, out, lse, reads, ...where(from, tokens, shape), nSel);
  return { out, lse };
}

function outputs(tape: Tape, q: Tensor, { sequences }: NewTokens, shape: HeadShape): PagedOutput {
  validateShapes(shape);
  expectFloats('paged attention: q', q, [sequences.total, shape.heads, shape.dk]);
  return {
    out: tape.empty([sequences.total, shape.heads, shape.dv], q.dtype),
    lse: tape.empty([sequences.total, shape.heads]),
  };
}

function where(from: Pages, tokens: NewTokens, { heads, groups, dk, dv }: HeadShape) {
  return [...pageArguments(from), ...tokenArguments(tokens), heads, groups, dk, dv] as const;
}

function pageArguments({ tables, place, size }: Pages) {
  return [tables, place, size] as const;
}

function tokenArguments({ sequences, starts }: NewTokens) {
  return [sequences.offsets, starts, sequences.count] as const;
}

function rowSize(x: Tensor): number {
  return x.shape.slice(1).reduce((product, size) => product * size, 1);
}
