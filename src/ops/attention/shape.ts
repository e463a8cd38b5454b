/** Shapes of the attention operations and their validity rules (docs/explain/attention.md). */
import { UsageError } from '../../errors.js';

/** `heads` query heads read `groups` key/value heads, group-major: head g * (heads / groups) + i reads group g. */
export interface HeadShape {
  readonly heads: number;
  readonly groups: number;
  readonly dk: number;
  readonly dv: number;
}

/** Blocks that every token selects whatever their importance is. */
export interface ForcedBlocks {
  /** Blocks from the beginning of the sequence. Default 1. */
  readonly initBlocks?: number;
  /** Blocks up to the current one, which is one of them. Default 2. */
  readonly localBlocks?: number;
}

/** Compression block `l` and its stride `d`, selection block `lSel`, selected blocks `nSel`, window `w`. */
export interface SparseShape extends ForcedBlocks {
  readonly l: number;
  readonly d: number;
  readonly lSel: number;
  readonly nSel: number;
  readonly w: number;
  /**
   * Importance of a selection block from the probabilities of the compressed blocks that overlap it: their sum, weighted
   * by the overlap, or the largest. Default `sum`.
   */
  readonly scorePool?: 'sum' | 'max';
  /**
   * `best`: the most important blocks. `chunked`: blocks are numbered in chunks of nSel; half of the slots are for the
   * most important blocks before the token's chunk, the other half for its own block and the most important ones before
   * it in the chunk. Requires `initBlocks` 0, `localBlocks` 1 and an even nSel. Default `best`.
   */
  readonly selection?: 'best' | 'chunked';
}

/** The settings that decide on the blocks of a token, given their importance. */
export type SelectionRule = ForcedBlocks & Pick<SparseShape, 'selection'>;

const MAX_HEADS_PER_GROUP = 32;

/** The numbers of forced blocks with their defaults. */
export function forcedBlocks({ initBlocks = 1, localBlocks = 2 }: ForcedBlocks): Required<ForcedBlocks> {
  return { initBlocks, localBlocks };
}

const FORCED_REFUSAL =
  'the fused kernels force block 0, the previous and the current block (init_blocks 1, local_blocks 2)';

/** Whether the forced blocks are block 0, the previous and the current one, as kernels that fix them require. */
function hasDefaultForcedBlocks(forced: ForcedBlocks): boolean {
  const { initBlocks, localBlocks } = forcedBlocks(forced);
  return initBlocks === 1 && localBlocks === 2;
}

/** Why kernels that fix the rule of the selection do not support this one; null if they do. */
export function selectionRefusal(sparse: SparseShape): string | null {
  if (sparse.selection === 'chunked') return 'the fused kernels select the best of all blocks (selection best)';
  if (!hasDefaultForcedBlocks(sparse)) return FORCED_REFUSAL;
  return sparse.scorePool === 'max' ? 'the fused kernels add the scores of a block (score_pool sum)' : null;
}

/** Throws a `UsageError` that names the size which does not fit. */
export function validateShapes(heads: HeadShape, sparse?: SparseShape): void {
  validateHeads(heads);
  if (sparse) validateSparse(sparse);
}

function validateHeads(shape: HeadShape): void {
  for (const field of ['heads', 'groups', 'dk', 'dv'] as const) expectWhole(field, shape[field], 1);
  const perGroup = shape.heads / shape.groups;
  if (!Number.isInteger(perGroup))
    throw new UsageError(`groups must divide heads: ${shape.groups} does not divide ${shape.heads}`);
  if (perGroup > MAX_HEADS_PER_GROUP)
    throw new UsageError(
      `groups must leave at most ${MAX_HEADS_PER_GROUP} heads in a group, not ${perGroup} (${shape.heads} heads in ${shape.groups} groups)`,
    );
}

function validateSparse(sparse: SparseShape): void {
  const { l, d, lSel, nSel, w } = sparse;
  const { initBlocks, localBlocks } = forcedBlocks(sparse);
  expectWhole('l', l, 1);
  expectWhole('d', d, 1);
  expectWhole('l_sel', lSel, 1);
  expectWhole('init_blocks', initBlocks, 0);
  expectWhole('local_blocks', localBlocks, 1); // a token always reads itself
  expectWhole('n_sel', nSel, initBlocks + localBlocks);
  expectWhole('w', w, 1);
  if (l % d !== 0) throw new UsageError(`d must divide l: ${d} does not divide ${l}`);
  if (lSel % d !== 0) throw new UsageError(`d must divide l_sel: ${d} does not divide ${lSel}`);
  if (sparse.selection === 'chunked' && (initBlocks !== 0 || localBlocks !== 1 || nSel % 2 !== 0))
    throw new UsageError(
      `selection chunked needs init_blocks 0, local_blocks 1 and an even n_sel, not ${initBlocks}, ${localBlocks} and ${nSel}`,
    );
  if (l > lSel) throw new UsageError(`l must be at most l_sel: ${l} is greater than ${lSel}`);
}

function expectWhole(field: string, value: number, least: number): void {
  if (!Number.isSafeInteger(value) || value < least)
    throw new UsageError(`${field} must be a whole number from ${least}, not ${value}`);
}
