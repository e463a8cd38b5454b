/**
 * Limits and needs of the fused attention kernels, as pure functions: macros, shared memory, the sizes
 * of buffers and grids. The kernels export the same numbers (EXPORT); a test on the GPU compares them.
 */
import type { KernelMacros } from '../../../device/cuda/runtime.js';
import { compressedCount } from '../../common/sequences.js';
import { type HeadShape, type SparseShape, selectionRefusal } from '../shape.js';

export interface FusedShape {
  readonly heads: HeadShape;
  readonly sparse: SparseShape;
}

/**
 * `queryMajor`: one token a tile in the selected branch (v1). `mmaSync`: mma.sync instead of wgmma. `windowApart`: the
 * window branch has queries of its own and kernels of its own; those of the other branches leave it out. `scored`: with
 * the scorer loss.
 */
export interface FusedBuild {
  readonly queryMajor: boolean;
  readonly mmaSync: boolean;
  readonly windowApart?: boolean;
  readonly scored?: boolean;
}

/** Rows of a tile, and bytes of a panel (64 rows of 64 bf16). */
const TILE = 64;
const PANEL = TILE * 128;
const STAGES = 4;
/** Rows (token, head) of a tile of two warpgroups. */
const UNION_ROWS = 2 * TILE;
/** A window longer than any sequence; twice its size still fits 32 bits. */
export const UNBOUNDED_WINDOW = 2 ** 30;
const MAX_KEY_SIZE = 192;
const MAX_VALUE_SIZE = 128;
const MIN_BLOCK = 16;
const MAX_BLOCK = 64;
const MAX_SELECTED = 64;
/** Bits for the blocks of the longest sequence: 65,536 blocks. */
const UNION_BITMAP_BYTES = 8192;
/** Limit for the queries of a group's heads and two tiles of keys, on every GPU. */
const SCORING_BYTES = 220 * 1024;
/** A row of probabilities and what the tile before carries over; the sums of all threads where heads share a tile. */
const POOLING_BYTES = TILE * (72 + 8) * 4;
const SHARES_BYTES = 2 * 128 * 32 * 4;
const LARGEST_INT = 2 ** 31 - 1;

/** As in plan.cuh and compressed.cu: a test compares them. KV-outer's ring has a place for `LAG + SLACK` stretches. */
export const PLANNED = {
  OUTER_CHUNK: 128,
  SEL_CHUNK: 512,
  LAG: 2,
  SLACK: 2,
  MAX_STRETCHES: 128,
  CMP_CHUNK: 512,
} as const;
const { OUTER_CHUNK, SEL_CHUNK, LAG, SLACK, MAX_STRETCHES, CMP_CHUNK } = PLANNED;
/** Blocks of a token that are never part of a partial result: they are forced. */
const FORCED = 3;

export const panels = (size: number) => Math.ceil(size / TILE);
export const headsPerGroup = ({ heads, groups }: HeadShape) => heads / groups;

/** Bytes of a tile of 64 keys and values, all groups. */
export function packedTileBytes({ dk, dv, groups }: HeadShape): number {
  return (panels(dk) + panels(dv)) * PANEL * groups;
}

/** Threads that share a row of `size` columns, eight columns each. */
export function rowLanes(size: number): number {
  return size <= 32 ? 4 : size <= 64 ? 8 : size <= 128 ? 16 : 32;
}

/** Dynamic shared memory a block may have, less what kernels declare for themselves. */
export function sharedLimit(architecture: number): number {
  const small = architecture === 86 || architecture === 89 || architecture >= 120;
  const kib = small ? 99 : architecture < 90 ? 163 : 227;
  return kib * 1024 - 1024;
}

/** Tokens of a tile of the union: as many as fill it, fewer where their lists do not fit the shared memory. */
export function unionTokens(shape: FusedShape, build: FusedBuild, limit: number): number {
  if (build.queryMajor) return 1;
  let tokens = Math.floor(UNION_ROWS / headsPerGroup(shape.heads));
  while (tokens > 1 && unionShared(shape, tokens, 2) + UNION_BITMAP_BYTES > limit) tokens = Math.ceil(tokens / 2);
  return tokens;
}

/** Blocks of the mean union up to which a kernel of the selected branch is used; `gather` 0: never. */
export interface SelectedLimits {
  readonly union: number;
  readonly gather: number;
}

/**
 * Up to which mean union tile-union is the fastest, then tile-gather, then KV-outer. Measured with 16 blocks a token: about
 * 36 and 150, without tile-gather 50. All costs are proportional to the blocks per token, and a partial tile costs
 * tile-union as much as a full one. `tokens`: of a tile of the union.
 */
export function selectedLimits(shape: FusedShape, tokens: number, hasGather: boolean): SelectedLimits {
  const full = Math.floor(UNION_ROWS / headsPerGroup(shape.heads));
  const scale = (shape.sparse.nSel / 16) * (tokens / full);
  return hasGather ? { union: 36 * scale, gather: 150 * scale } : { union: 50 * scale, gather: 0 };
}

/** Whether the device could only choose tile-union: no token sees more blocks than a mean union may have. */
export function isAlwaysUnion(shape: FusedShape, limit: number, longest: number): boolean {
  return Math.ceil(longest / shape.sparse.lSel) <= limit;
}

/** Whether KV-outer may run: the host knows that it does not if no token sees enough blocks for it. */
export function mayUseOuter(path: string, shape: FusedShape, limits: SelectedLimits, longest: number): boolean {
  const limit = Math.max(limits.union, limits.gather);
  return path === 'outer' || (path === 'adaptive' && Math.ceil(longest / shape.sparse.lSel) > limit);
}

/** Selection blocks of a sequence up to which tile-gather runs: their masks must fit its ring of keys and values. */
const MAX_GATHER_BLOCKS = 4096;

/** Why there is no tile-gather for this shape and length on a GPU of this architecture, or null. */
export function gatherRefusal(
  { heads, sparse }: FusedShape,
  build: FusedBuild,
  architecture: number,
  longest: number,
): string | null {
  if (architecture !== 90 || build.mmaSync || build.queryMajor) return 'tile-gather is for Hopper';
  const supported = heads.dk === 64 && heads.dv === 64 && sparse.lSel === 64;
  if (!supported) return 'tile-gather needs head sizes and selection blocks of 64';
  if (headsPerGroup(heads) > 6) return 'tile-gather needs at most 6 heads a group';
  if (sparse.nSel > 16) return 'tile-gather needs at most 16 blocks a token';
  const most = MAX_GATHER_BLOCKS * sparse.lSel;
  return longest > most ? `tile-gather takes sequences of up to ${most} tokens, not ${longest}` : null;
}

export function fusedMacros({ heads, sparse }: FusedShape, build: FusedBuild, unionTokens: number): KernelMacros {
  return {
    ...headMacros(heads),
    CMP_L: sparse.l,
    CMP_D: sparse.d,
    SEL_L: sparse.lSel,
    SEL_N: sparse.nSel,
    WINDOW: Math.min(sparse.w, UNBOUNDED_WINDOW),
    UNION_TOKENS: unionTokens,
    ...(build.queryMajor ? { UNION_WARPGROUPS: 1 } : {}),
    ...(build.mmaSync ? { MMA_SYNC: 1 } : {}),
  };
}

export function headMacros({ heads, groups, dk, dv }: HeadShape): KernelMacros {
  return { HEADS: heads, GROUPS: groups, DK: dk, DV: dv };
}

/** Shared memory of a tile that streams keys: rows of its own, and the stages of the ring. */
function streamShared({ dk, dv }: HeadShape, warpgroups: number, ownPanels: number): number {
  return (warpgroups * ownPanels + STAGES * (panels(dk) + panels(dv))) * PANEL + 1024 + 128;
}

function unionShared({ heads, sparse }: FusedShape, tokens: number, warpgroups: number): number {
  const most = tokens * sparse.nSel;
  const words = Math.ceil(most / 32);
  const general = 4 * (tokens * words + 2 + Math.ceil(most / 2));
  const short = 4 * (tokens * 2 + 2 + 32); // bits for 64 blocks; one for each warpgroup
  return streamShared(heads, warpgroups, panels(heads.dk)) + Math.max(general, warpgroups * short);
}

/**
 * Shared memory of a block that walks queries: keys and values, stages of queries, four numbers for each of their
 * rows.
 */
function backwardShared({ dk, dv }: HeadShape, stages: number): number {
  return (1 + stages) * (panels(dk) + panels(dv)) * PANEL + stages * 4 * TILE * 4 + 1024;
}

/** Shared memory of dense and window attention. */
export function windowShared(heads: HeadShape): Record<'forward' | 'backward' | 'queryGradient', number> {
  const [pk, pv] = [panels(heads.dk), panels(heads.dv)];
  return {
    forward: streamShared(heads, 2, pk),
    backward: backwardShared(heads, pk + pv <= 2 ? 3 : 2),
    queryGradient: streamShared(heads, pk + pv <= 2 ? 3 : 1, pk + pv),
  };
}

/** Shared memory of the compressed branch: small heads leave room for the queries of the next tile of rows. */
function compressedShared(heads: HeadShape): number {
  const [pk, pv] = [panels(heads.dk), panels(heads.dv)];
  return streamShared(heads, 2, pk + pv <= 2 ? 2 * pk : pk);
}

/**
 * Heads of a group in one tile of the kernel that ranks blocks: 1, or 2 or 4 with fewer tokens where they do not fit.
 */
export function scoringSplit(heads: HeadShape): 1 | 2 | 4 {
  const bytes = (split: number) => scoringBytes(heads, split) + POOLING_BYTES;
  return bytes(1) < SCORING_BYTES ? 1 : bytes(2) < SCORING_BYTES ? 2 : 4;
}

function scoringBytes(heads: HeadShape, split: number): number {
  return (scoringTiles(heads, split) + 2) * panels(heads.dk) * PANEL + (split > 1 ? SHARES_BYTES : 0);
}

/** Tiles of queries: as many for each of the two warpgroups that work together where heads share a tile. */
function scoringTiles(heads: HeadShape, split: number): number {
  const teams = split > 1 ? 2 : 1;
  return teams * Math.ceil(headsPerGroup(heads) / (split * teams));
}

/**
 * Shared memory of the KV-outer kernel: two stages of queries, and where rows lie; for wide or many heads that is
 * looked up per token.
 */
function outerShared(heads: HeadShape): number {
  const [pk, pv, h] = [panels(heads.dk), panels(heads.dv), headsPerGroup(heads)];
  const entries = OUTER_CHUNK * (pk + pv <= 2 && h <= 14 ? h : 1);
  return (pk + pv + 2 * pk + 1) * PANEL + entries * 8 + 1024;
}

/**
 * Shared memory of tile-gather: the ring of keys and values; queries, sums and four numbers of each row; an exponent of
 * each token; barriers and lists.
 */
export function gatherShared({ heads, sparse }: FusedShape): number {
  const rows = TILE * headsPerGroup(heads);
  const choices = TILE * Math.max(1, sparse.nSel - FORCED);
  const ring = STAGES * (panels(heads.dk) + panels(heads.dv)) * PANEL;
  const ofRows = (rows + 8) * (128 + 4 * 4) + (rows + 1) * 128;
  return ring + ofRows + TILE * 4 + 8 * STAGES * 2 + 16 * 4 + choices * 8 + 8 + 1024;
}

/** Compressed keys that overlap a selection block. */
export function overlapping({ l, d, lSel }: SparseShape): number {
  return (lSel + l) / d - 1;
}

/** Shared memory of the kernels of the scorer loss, which is less than that of the others. */
export function scorerShared({ heads, sparse }: FusedShape) {
  const rows = 16 * Math.ceil(overlapping(sparse) / 16);
  const pk = panels(heads.dk);
  // A list, compressed keys, and for each of four warps 16 rows of queries.
  const both = 4 * SEL_CHUNK + pk * rows * 128 + pk * PANEL + 128;
  const transposed = 4 * 16 * 32;
  return {
    scorer_masses_shared: both + pk * PANEL,
    scorer_gradients_shared: both + transposed + rows * heads.dk * 4,
  };
}

/**
 * Dynamic shared memory of the kernels (of tile-gather: `gatherShared`, of the scorer loss: `scorerShared`), by the name
 * of their EXPORT.
 */
export function sharedBytes(shape: FusedShape, build: FusedBuild, unionTokens: number) {
  const { heads, sparse } = shape;
  const { forward, backward, queryGradient } = windowShared(heads);
  const pooledInRegisters = sparse.lSel / sparse.d === 4 && sparse.l / sparse.d === 2;
  const split = scoringSplit(heads);
  const shifts = scoringTiles(heads, split) * TILE * 4;
  return {
    compressed_forward_shared: compressedShared(heads),
    compressed_backward_shared: backward,
    compressed_window_query_gradient_shared: queryGradient,
    window_forward_shared: forward,
    window_backward_shared: backward,
    window_query_gradient_shared: queryGradient,
    select_blocks_shared: scoringBytes(heads, split) + shifts + 1024 + (pooledInRegisters ? 0 : POOLING_BYTES),
    selected_union_shared: unionShared(shape, unionTokens, build.queryMajor ? 1 : 2),
    selected_dense_shared: forward,
    selected_outer_shared: outerShared(heads),
    selected_backward_shared: backwardShared(heads, 2) + 2 * PANEL + SEL_CHUNK * 12,
  };
}

/** Why the kernels do not support these heads, or null. */
export function headsRefusal(heads: HeadShape): string | null {
  const { dk, dv } = heads;
  const perGroup = headsPerGroup(heads);
  if (!Number.isInteger(perGroup) || perGroup < 1 || perGroup > 16)
    return `${heads.heads} heads in ${heads.groups} groups: 1 to 16 heads a group are supported`;
  for (const [name, size, most] of [
    ['d_k', dk, MAX_KEY_SIZE],
    ['d_v', dv, MAX_VALUE_SIZE],
  ] as const)
    if (size % 16 !== 0 || size < 16 || size > most)
      return `${name} ${size}: multiples of 16 up to ${most} are supported`;
  return null;
}

/** Why the kernels do not support this shape on a GPU of this architecture, or null. */
export function shapeRefusal(shape: FusedShape, build: FusedBuild, architecture: number): string | null {
  const { l, d, lSel, nSel } = shape.sparse;
  const rule = selectionRefusal(shape.sparse);
  if (rule !== null) return rule;
  const refused = headsRefusal(shape.heads);
  if (refused) return refused;
  if (lSel < MIN_BLOCK || lSel > MAX_BLOCK) return `l_sel ${lSel}: ${MIN_BLOCK} to ${MAX_BLOCK} are supported`;
  if (l % d !== 0 || lSel % d !== 0 || l > lSel)
    return `l ${l}, d ${d}, l_sel ${lSel}: d must divide both, and l <= l_sel`;
  if (l / d > 9) return `l ${l} is ${l / d} strides of d ${d}: at most 9 are supported`;
  if (nSel < 3 || nSel > MAX_SELECTED) return `n_sel ${nSel}: 3 to ${MAX_SELECTED} are supported`;
  const limit = sharedLimit(architecture);
  const needed = sharedBytes(shape, build, unionTokens(shape, build, limit));
  for (const [name, bytes] of Object.entries(needed))
    if (bytes > limit)
      return `${name.replace('_shared', '')} needs ${bytes} bytes of shared memory, and this GPU has ${limit}`;
  return null;
}

/** Why the kernels do not support a batch of this size, or null: 32-bit indices. */
export function batchRefusal(
  { heads, sparse }: FusedShape,
  tokens: { readonly total: number; readonly longest: number },
  limit: number,
): string | null {
  const { total, longest } = tokens;
  if (total * Math.max(heads.heads, heads.groups * sparse.nSel) > LARGEST_INT)
    return `${total} tokens: queries and choices of a batch are counted in 32 bits`;
  // The bitmaps of select_finish (eight warps) and of select_sort.
  const bitmap = Math.max(32 * Math.ceil(longest / sparse.lSel / 32), 4 * Math.ceil(longest / 32));
  if (bitmap > limit || 4 * Math.ceil(longest / sparse.lSel / 32) > UNION_BITMAP_BYTES)
    return `${longest} tokens in a sequence: their bitmap does not fit the shared memory`;
  return null;
}

/**
 * Whether one kernel can compute all gradients of the compressed and the window branch, five products instead of seven
 * and sums of the queries' gradient in fp32. It exists for Hopper and heads of 64 only.
 */
export function hasJoint({ heads, sparse }: FusedShape, build: FusedBuild, architecture: number): boolean {
  return architecture === 90 && !build.mmaSync && heads.dk === 64 && heads.dv === 64 && sparse.lSel === 64;
}

/** Rows of the fp32 sums of the queries' gradient: those of whole blocks of 64 tokens. */
export function querySumRows(plan: BatchPlan, { heads }: FusedShape): number {
  return plan.blocks * TILE * heads.heads;
}

/** Counts of one batch, from which every grid and every buffer follows. */
export interface BatchPlan {
  readonly tokens: number;
  readonly compressed: number;
  readonly longest: number;
  /** Selection blocks of all sequences. */
  readonly blocks: number;
  /** (block, group): each has the list of tokens that chose it. */
  readonly lists: number;
  /** (token, group, slot) */
  readonly choices: number;
  /** Words of a bitmap of the blocks of the longest sequence. */
  readonly words: number;
  /** Tokens of a stretch (README.md); partial results exist for only a few stretches at a time. */
  readonly stretch: number;
  readonly stretches: number;
  readonly forwardItems: number;
  readonly backwardItems: number;
  /** Rows (token in the ring, head, chosen slot) of partial results. */
  readonly partialRows: number;
  readonly compressedTiles: number;
  /** Tiles of `per` compressed keys over all sequences. */
  keyTiles(per: number): number;
  /** Chunks of tokens that the compressed branch's backward pass processes separately. */
  readonly compressedChunks: number;
  /** Tiles of `per` tokens, or of `per` rows (token, head of a group), over all sequences. */
  tokenTiles(per: number): number;
  rowTiles(per: number): number;
}

/** Shorter stretches for short sequences, whose lists still have enough tokens per stretch. */
const stretchFor = (longest: number) => (longest <= 16_384 ? 2048 : 8192);

export function planBatch(lengths: readonly number[], shape: FusedShape): BatchPlan {
  const { heads, sparse } = shape;
  const sum = (each: (length: number) => number) => lengths.reduce((total, length) => total + each(length), 0);
  const tokens = sum((length) => length);
  const longest = lengths.reduce((most, length) => Math.max(most, length), 0);
  const blocks = sum((length) => Math.ceil(length / sparse.lSel));
  const lists = blocks * heads.groups;
  const choices = tokens * heads.groups * sparse.nSel;
  const least = 16 * Math.ceil(Math.ceil(tokens / MAX_STRETCHES) / 16);
  const stretch = Math.max(stretchFor(longest), least);
  const stretches = Math.ceil(tokens / stretch);
  const count = (length: number) => compressedCount(length, sparse.l, sparse.d);
  return {
    tokens,
    compressed: sum(count),
    longest,
    blocks,
    lists,
    choices,
    words: Math.ceil(Math.ceil(longest / sparse.lSel) / 32),
    stretch,
    stretches,
    // A list of a stretch ends with an item that need not be full; the same for a list and its backward items.
    forwardItems: Math.floor(choices / OUTER_CHUNK) + Math.min(lists * stretches, choices),
    backwardItems: Math.floor(choices / SEL_CHUNK) + lists,
    partialRows: Math.min((LAG + SLACK) * stretch, tokens) * heads.heads * Math.max(1, sparse.nSel - FORCED),
    compressedTiles: sum((length) => Math.ceil(count(length) / TILE)),
    keyTiles: (per) => sum((length) => Math.ceil(count(length) / per)),
    compressedChunks: Math.ceil(longest / CMP_CHUNK),
    tokenTiles: (per) => sum((length) => Math.ceil(length / per)),
    rowTiles: (per) => sum((length) => Math.ceil((length * headsPerGroup(heads)) / per)),
  };
}
