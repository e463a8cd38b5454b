/**
 * The attention core by fused tensor-core kernels (CUDA, bf16): one operation with one backward rule in the place of
 * compressed, select, selected, window and combine. dev/log/kernel-notes.md has the design and the measurements.
 *
 * Gates must not be negative, which no gate is: the backward pass takes their logarithm. Only `out` is differentiated.
 *
 * The selected branch has two builds. Query-major (`v1`) gives every token a tile of its own, of which its heads fill a
 * tenth: 6.74 ms against 1.37 at 65,536 tokens. `v2` shares: tile-union where neighbours agree or a sequence is short,
 * KV-outer otherwise, and the device chooses between them by the selections of the batch. A tile of the union costs as
 * much as a tile of one token and serves 128 / heads-per-group of them, so no length is short enough for v1 to win, and
 * `adaptive` is v2 at every length; `sharedFrom` is a threshold of the other kernels.
 *
 * Masked values are multiplied by zero, as tensor cores do: an infinity or NaN in a value reaches every query of its tile,
 * also the earlier ones. Finite values of the future never do.
 */
import type { Device } from '../../../device/device.js';
import type { Tape } from '../../../tensor/tape.js';
import type { Dtype, Tensor } from '../../../tensor/tensor.js';
import { OverwrittenGradients } from '../../common/gradient-targets.js';
import type { Sequences } from '../../common/sequences.js';
import { expectShape } from '../../common/shapes.js';
import type { SparseInputs, SparseLayout, SparseOptions, SparseOutputs } from '../nsa.js';
import type { HeadShape, SparseShape } from '../shape.js';
import { allocateBackward, FusedBackward, type Gradients } from './backward.js';
import { cudaRuntime, FusedBatch } from './code.js';
import {
  allocateRanked,
  allocateResults,
  allocateScratch,
  FusedForward,
  type Ranked,
  type SelectedPath,
} from './forward.js';
import { batchRefusal, type FusedBuild, type FusedShape, shapeRefusal, sharedLimit } from './plan.js';

export { SELECTED_PATHS, type SelectedPath } from './forward.js';

/** How the fused kernels run; all of it for tests and benches but `deterministic`. */
export interface FusedOptions {
  /** Sums in a fixed order: the same bits every time. Costs 5 to 8 % of the backward pass, and memory. */
  readonly deterministic?: boolean;
  /** The way of the selected branch; by default the device chooses. */
  readonly path?: SelectedPath;
  /** mma.sync in place of Hopper's wgmma. Other GPUs have nothing else. */
  readonly portable?: boolean;
}

/** What is asked of the kernels. */
export interface FusedProblem extends FusedShape {
  /** Of queries, keys and values. */
  readonly dtype: Dtype;
  readonly tokens: Pick<Sequences, 'total' | 'longest'>;
}

/** Why the fused kernels cannot serve here, in words; null when they can. */
export function fusedRefusal(problem: FusedProblem, device: Device, options: SparseOptions = {}): string | null {
  const cuda = cudaRuntime(device);
  const { tokens } = problem;
  if (!cuda) return `the fused kernels run on CUDA, not on ${device.kind}`;
  if (problem.dtype !== 'bf16') return `the fused kernels take bf16, not ${problem.dtype}`;
  if (options.kernel === 'reference') return 'the reference was asked for';
  const { fusedFrom = 0 } = options;
  if (tokens.longest < fusedFrom)
    return fusedFrom === Number.POSITIVE_INFINITY
      ? 'the fused kernels are switched off'
      : `the fused kernels serve from ${fusedFrom} tokens on`;
  const refused = shapeRefusal(problem, fusedBuild(options), cuda.architecture);
  return refused ?? batchRefusal(problem, tokens, sharedLimit(cuda.architecture));
}

export function fusedBuild({ kernel, portable = false }: SparseOptions): FusedBuild {
  return { queryMajor: kernel === 'v1', portable };
}

/** The query-major build is a union of one token. */
export function fusedPath({ kernel, path = 'adaptive' }: SparseOptions): SelectedPath {
  return kernel === 'v1' ? 'union' : path;
}

const NAMES = ['q', 'kCmp', 'vCmp', 'kSel', 'vSel', 'kWin', 'vWin', 'gates'] as const;

/**
 * Whether a checkpointed block keeps what `FusedForward.rank` computes, about 1.9 kB a token and layer at 12 heads of 64,
 * instead of computing it twice: at 32,768 tokens that is 5 % of a step, at a million a quarter.
 */
export function isKept(longest: number): boolean {
  return longest >= 32_768;
}

/** The caller has asked `fusedRefusal`. */
export function fusedSparseAttention(
  tape: Tape,
  inputs: SparseInputs,
  layout: SparseLayout,
  sparse: SparseShape,
  options: SparseOptions = {},
): SparseOutputs {
  const cuda = cudaRuntime(tape.device);
  if (!cuda) throw new Error('the fused attention kernels need a CUDA device');
  const batch = new FusedBatch(cuda, { heads: headsOf(inputs, layout), sparse }, fusedBuild(options), layout);
  const path = fusedPath(options);
  const ordered = options.deterministic ?? false;
  const isEmpty = layout.tokens.total === 0;
  const prepare = (ranked: Ranked) =>
    new FusedForward(batch, inputs, allocateResults(tape, batch, ranked), allocateScratch(tape, batch, path, ranked));
  let forward: FusedForward | undefined;
  const rank = () => {
    const ranked = allocateRanked(tape, batch);
    forward = prepare(ranked);
    if (!isEmpty) forward.rank();
    return ranked;
  };
  const ranked = isKept(layout.tokens.longest) ? tape.once(rank) : rank();
  forward ??= prepare(ranked);
  if (!isEmpty) forward.attend(path, { sorted: ordered && tape.recording, served: options.counters?.served ?? null });
  dropAll(tape, forward.scratch);
  const { results } = forward;
  const { out, oCmp, oSel, oWin, selected } = results;
  const given = NAMES.map((name) => inputs[name]);
  const { out: _, ...read } = results;
  tape.record(given, [out], [...given, ...Object.values(read)], () => {
    const dOut = tape.gradient(out);
    if (!dOut) return;
    const gradients = new OverwrittenGradients(tape, given);
    if (!isEmpty) {
      const into = Object.fromEntries(NAMES.map((name, i) => [name, gradients.into[i]])) as Gradients;
      const scratch = allocateBackward(tape, batch, ordered);
      new FusedBackward(batch, inputs, results, scratch, dOut, into).run(ordered);
      dropAll(tape, scratch);
    }
    gradients.finish();
  });
  // Nobody but the rule reads these; it has them saved, if there is one.
  const { lseCmp, lseSel, lseWin, lists, offsets, backwardItems } = results;
  dropAll(tape, { lseCmp, lseSel, lseWin, lists, offsets, backwardItems });
  return { out, oCmp, oSel, oWin, selected };
}

function dropAll(tape: Tape, tensors: object): void {
  for (const tensor of Object.values(tensors) as (Tensor | null)[]) if (tensor) tape.drop(tensor);
}

function headsOf(inputs: SparseInputs, { tokens, blocks }: SparseLayout): HeadShape {
  const what = (name: string) => `fused sparse attention: ${name}`;
  const [, heads, dk] = expectShape(what('q'), inputs.q, [tokens.total, -1, -1], 'bf16');
  const [, groups] = expectShape(what('k_sel'), inputs.kSel, [tokens.total, -1, dk], 'bf16');
  const [, , dv] = expectShape(what('v_sel'), inputs.vSel, [tokens.total, groups, -1], 'bf16');
  expectShape(what('k_win'), inputs.kWin, [tokens.total, groups, dk], 'bf16');
  expectShape(what('v_win'), inputs.vWin, [tokens.total, groups, dv], 'bf16');
  expectShape(what('k_cmp'), inputs.kCmp, [blocks.total, groups, dk], 'bf16');
  expectShape(what('v_cmp'), inputs.vCmp, [blocks.total, groups, dv], 'bf16');
  expectShape(what('gates'), inputs.gates, [tokens.total, heads, 3], 'f32');
  return { heads, groups, dk, dv };
}
