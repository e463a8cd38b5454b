/**
 * The attention core by fused tensor-core kernels (CUDA, bf16): one operation with one backward rule instead of
 * compressed, select, selected, window and combine. dev/log/2026-11-kernels.md has the design and the measurements.
 *
 * Gates must be non-negative: the backward pass takes their logarithm. Only `out` is differentiated.
 *
 * The selected branch has two builds. Query-major (`v1`) gives every token a tile of its own, of which its heads fill a
 * tenth: 6.74 ms against 1.37 at 65,536 tokens. `v2` shares: tile-union where neighbours agree or a sequence is short,
 * tile-gather up to about 12,000 tokens, KV-outer otherwise; the device chooses by the selections of the batch. A tile of the union costs as
 * much as a tile of one token and holds 128 / heads-per-group of them, so no length is short enough for v1 to win, and
 * `adaptive` is v2 at every length; `sharedFrom` is a threshold of the other kernels.
 *
 * Masked values are multiplied by zero, as tensor cores do: an infinity or NaN in a value reaches every query of its
 * tile, also the earlier ones. Finite values of the future never do.
 */

import { type CudaRuntime, cudaRuntime } from '../../../device/cuda/runtime.js';
import type { Device } from '../../../device/device.js';
import type { Tape } from '../../../tensor/tape.js';
import type { Dtype, Tensor } from '../../../tensor/tensor.js';
import { OverwrittenGradients } from '../../common/gradient-targets.js';
import type { Sequences } from '../../common/sequences.js';
import { expectShape } from '../../common/shapes.js';
import type { SparseInputs, SparseOptions, SparseOutputs } from '../nsa.js';
import type { HeadShape, SparseShape } from '../shape.js';
import { allocateBackward, backwardPath, FusedBackward, type Gradients } from './backward.js';
import { FusedBatch } from './code.js';
import {
  allocateRanked,
  allocateResults,
  allocateScratch,
  FusedForward,
  type Ranked,
  type SelectedPath,
} from './forward.js';
import { batchRefusal, type FusedBuild, type FusedShape, shapeRefusal, sharedLimit } from './plan.js';
import { FusedScorer, scorerRefusal } from './scorer.js';

export { SELECTED_PATHS, type SelectedPath } from './forward.js';

/** How the fused kernels run. All options but `deterministic` are for tests and benchmarks. */
export interface FusedOptions {
  /** Sums in a fixed order, so that results repeat bit for bit. Costs 5 to 8 % of the backward pass, and memory. */
  readonly deterministic?: boolean;
  /** Path of the selected branch; by default the device chooses. */
  readonly path?: SelectedPath;
  /**
   * False: no use of the kernel that computes all gradients of the compressed and the window branch. It runs where there
   * is one, but not in deterministic mode.
   */
  readonly joint?: boolean;
  /** Tensor-core products by mma.sync instead of Hopper's wgmma. Other GPUs always use mma.sync. */
  readonly mmaSync?: boolean;
}

/** Shape, dtype and size of a call. */
export interface FusedProblem extends FusedShape {
  /** Type of queries, keys and values. */
  readonly dtype: Dtype;
  readonly tokens: Pick<Sequences, 'total' | 'longest'>;
}

/** Why the fused kernels cannot run here, as a sentence; null if they can. */
export function fusedRefusal(problem: FusedProblem, device: Device, options: SparseOptions = {}): string | null {
  const cuda = cudaRuntime(device);
  const { tokens } = problem;
  if (!cuda) return `the fused kernels run on CUDA, not on ${device.kind}`;
  if (problem.dtype !== 'bf16') return `the fused kernels take bf16, not ${problem.dtype}`;
  if (options.kernel === 'reference') return 'the reference kernel was requested';
  const { fusedFrom = 0 } = options;
  if (tokens.longest < fusedFrom)
    return fusedFrom === Number.POSITIVE_INFINITY
      ? 'the fused kernels are switched off'
      : `the fused kernels run from ${fusedFrom} tokens on`;
  const refused =
    shapeRefusal(problem, fusedBuild(options), cuda.architecture) ??
    ((options.scorerWeight ?? 0) > 0 ? scorerRefusal(problem.sparse) : null);
  return refused ?? batchRefusal(problem, tokens, sharedLimit(cuda.architecture));
}

export function fusedBuild({ kernel, mmaSync = false }: SparseOptions): FusedBuild {
  return { queryMajor: kernel === 'v1', mmaSync };
}

/** The query-major build is tile-union with one token per tile. */
export function fusedPath({ kernel, path = 'adaptive' }: SparseOptions): SelectedPath {
  return kernel === 'v1' ? 'union' : path;
}

const NAMES = ['q', 'kCmp', 'vCmp', 'kSel', 'vSel', 'kWin', 'vWin', 'gates', 'qWin'] as const;

/**
 * Whether a checkpointed block keeps what `FusedForward.rank` computes, about 1.9 kB a token and layer at 12 heads of
 * 64, instead of computing it twice: at 32,768 tokens that is 5 % of a step, at a million a quarter.
 */
export function isKept(longest: number): boolean {
  return longest >= 32_768;
}

/** Requires that `fusedRefusal` returns null. */
export function fusedSparseAttention(
  tape: Tape,
  inputs: SparseInputs,
  tokens: Sequences,
  sparse: SparseShape,
  options: SparseOptions = {},
): SparseOutputs {
  const cuda = cudaRuntime(tape.device);
  if (!cuda) throw new Error('the fused attention kernels need a CUDA device');
  const batch = batchOf(cuda, inputs, tokens, sparse, options);
  const path = batch.pathOf(fusedPath(options));
  const ordered = options.deterministic ?? false;
  const isEmpty = tokens.total === 0;
  const prepare = (ranked: Ranked) =>
    new FusedForward(batch, inputs, allocateResults(tape, batch, ranked), allocateScratch(tape, batch, path, ranked));
  let forward: FusedForward | undefined;
  const rank = () => {
    const ranked = allocateRanked(tape, batch);
    forward = prepare(ranked);
    if (!isEmpty) forward.rank();
    return ranked;
  };
  const ranked = isKept(tokens.longest) ? tape.once(rank) : rank();
  forward ??= prepare(ranked);
  if (!isEmpty) forward.attend(path, { sorted: ordered && tape.recording, served: options.counters?.served ?? null });
  dropAll(tape, forward.scratch);
  const { results } = forward;
  const { scorerWeight = 0 } = options;
  const scorer = scorerWeight > 0 ? new FusedScorer(tape, cuda, batch, inputs, results, tokens, scorerWeight) : null;
  const { out, oCmp, oSel, oWin, selected } = results;
  const names = NAMES.filter((name) => inputs[name]);
  const given = names.map((name) => inputs[name]!);
  const { out: _, ...read } = results;
  tape.record(given, [out], [...given, ...Object.values(read), ...(scorer?.saved ?? [])], () => {
    const dOut = tape.gradient(out);
    if (!dOut) return;
    const gradients = new OverwrittenGradients(tape, given);
    if (!isEmpty) {
      const into = Object.fromEntries(names.map((name, i) => [name, gradients.into[i]])) as unknown as Gradients;
      const scratch = allocateBackward(tape, batch, backwardPath(batch, options));
      new FusedBackward(batch, inputs, results, scratch, dOut, into).run(ordered, scorer);
      dropAll(tape, scratch);
    }
    gradients.finish();
  });
  // Only the backward rule reads these, and it has saved them.
  const { lseCmp, lseSel, lseWin, lists, offsets, backwardItems } = results;
  dropAll(tape, { lseCmp, lseSel, lseWin, lists, offsets, backwardItems, ...scorer?.saved });
  return { out, oCmp, oSel, oWin, selected, ...(scorer && { scorerLoss: scorer.loss }) };
}

/**
 * Attention of the tokens of one sequence from `start` on, over the keys and values of all of them. Rows of `q` and
 * `gates` before the start are not used; rows of the results before it are undefined. No gradients. Requires that
 * `fusedRefusal` returns null.
 */
export function fusedSparseAttentionFrom(
  tape: Tape,
  inputs: SparseInputs,
  tokens: Sequences,
  sparse: SparseShape,
  start: number,
  options: SparseOptions = {},
): SparseOutputs {
  const cuda = cudaRuntime(tape.device);
  if (!cuda || tape.recording || tokens.count !== 1) throw new Error('one sequence on CUDA, without gradients');
  const batch = batchOf(cuda, inputs, tokens, sparse, options);
  const ranked = allocateRanked(tape, batch);
  const results = allocateResults(tape, batch, ranked);
  const scratch = allocateScratch(tape, batch, 'union', ranked);
  new FusedForward(batch, inputs, results, scratch, start).attendFrom();
  const { out, oCmp, oSel, oWin, selected, ...rest } = results;
  dropAll(tape, { ...scratch, ...rest });
  return { out, oCmp, oSel, oWin, selected };
}

function dropAll(tape: Tape, tensors: object): void {
  for (const tensor of Object.values(tensors) as (Tensor | null)[]) if (tensor) tape.drop(tensor);
}

function batchOf(
  cuda: CudaRuntime,
  inputs: SparseInputs,
  tokens: Sequences,
  sparse: SparseShape,
  options: SparseOptions,
): FusedBatch {
  const apart = { windowApart: inputs.qWin !== undefined, scored: (options.scorerWeight ?? 0) > 0 };
  const build = { ...fusedBuild(options), ...apart };
  return new FusedBatch(cuda, { heads: headsOf(inputs, tokens, sparse), sparse }, build, tokens);
}

function headsOf(inputs: SparseInputs, tokens: Sequences, sparse: SparseShape): HeadShape {
  const blocks = tokens.compressed(sparse);
  const what = (name: string) => `fused sparse attention: ${name}`;
  const [, heads, dk] = expectShape(what('q'), inputs.q, [tokens.total, -1, -1], 'bf16');
  if (inputs.qWin) expectShape(what('q_win'), inputs.qWin, inputs.q.shape, 'bf16');
  const [, groups] = expectShape(what('k_sel'), inputs.kSel, [tokens.total, -1, dk], 'bf16');
  const [, , dv] = expectShape(what('v_sel'), inputs.vSel, [tokens.total, groups, -1], 'bf16');
  expectShape(what('k_win'), inputs.kWin, [tokens.total, groups, dk], 'bf16');
  expectShape(what('v_win'), inputs.vWin, [tokens.total, groups, dv], 'bf16');
  expectShape(what('k_cmp'), inputs.kCmp, [blocks.total, groups, dk], 'bf16');
  expectShape(what('v_cmp'), inputs.vCmp, [blocks.total, groups, dv], 'bf16');
  expectShape(what('gates'), inputs.gates, [tokens.total, heads, 3], 'f32');
  return { heads, groups, dk, dv };
}
