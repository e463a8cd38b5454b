/** The compressed branch of a decode step spread over the whole GPU (spread.cu), for few sequences of long contexts. */
import type { CudaCode, CudaRuntime, LaunchShape } from '../../../../device/cuda/runtime.js';
import type { Device } from '../../../../device/device.js';
import { Tensor } from '../../../../tensor/tensor.js';
import { type StepShape, stepMacros } from './shape.js';
import type { StepBuffers, StepPages } from './step.js';

/** Warps of a block of attention.cu: each merges one share. */
const WARPS = 8;
const CLUSTER = 8;
const SPLITS = WARPS * CLUSTER;
const FORCED_BLOCKS = 3;
/** (sequence, group) pairs at most: with more, clusters fill the GPU by themselves. */
const MAX_PAIRS = 4;
/** Tokens of context from which two more launches a layer cost less than they save. */
const FROM_CONTEXT = 524_288;

/** Whether the kernels can take the shape, and are worth it unless `wanted` decides. */
export function isSpread(
  { heads, sparse }: StepShape,
  batch: number,
  cluster: number,
  context: number,
  wanted: boolean | undefined,
): boolean {
  if (!sparse || sparse.nSel <= FORCED_BLOCKS || cluster !== CLUSTER) return false;
  return wanted ?? (batch * heads.groups <= MAX_PAIRS && context >= FROM_CONTEXT);
}

export class SpreadBranch {
  /** Results of the shares, [batch, groups, splits] records of heads-per-group (2 + dv) + 1 numbers. */
  readonly records: Tensor;
  /** The best blocks of each share, [batch, groups, splits, n_sel - 3]: their importance and index. */
  readonly important: Tensor;
  readonly candidates: Tensor;
  readonly #scores: Tensor;
  readonly #code: CudaCode;
  readonly #grid: readonly [number, number, number];
  readonly #capacity: number;
  readonly #rankBytes: number;

  /** `capacity`: compressed keys of a sequence at most. The caller has asked `isSpread`. */
  constructor(cuda: Device & CudaRuntime, shape: StepShape, batch: number, context: number, capacity: number) {
    const { heads, groups, dv } = shape.heads;
    const { nSel, lSel } = shape.sparse!;
    const shares = batch * groups * SPLITS;
    this.#code = cuda.compile(new URL('./spread.cu', import.meta.url), stepMacros(shape));
    this.#grid = [SPLITS, groups, batch];
    this.#capacity = capacity;
    this.#rankBytes = 16 * Math.ceil(Math.ceil(context / lSel) / SPLITS / 4); // read 16 bytes at a time
    this.#scores = Tensor.empty(cuda, [batch * heads * capacity]);
    this.records = Tensor.empty(cuda, [shares * ((heads / groups) * (2 + dv) + 1)]);
    this.important = Tensor.empty(cuda, [shares * (nSel - FORCED_BLOCKS)]);
    this.candidates = Tensor.empty(cuda, [shares * (nSel - FORCED_BLOCKS)], 'i32');
  }

  /** Attends to the compressed keys, and puts the new tokens into the cache. */
  see(
    { projection, positions, rotations }: StepBuffers,
    { cmp, sel, win, tail }: StepPages,
    phi: { readonly keys: Tensor; readonly values: Tensor } | null,
    overlap: boolean,
  ): void {
    const pages = [cmp, sel, win, tail].flatMap((of) => [of?.tables ?? null, of?.place ?? 0]);
    this.#code.launch(
      'step_scores',
      this.#launched(this.#code.constant('step_scores_shared'), overlap),
      ...[projection, positions, rotations, ...pages, phi?.keys ?? null, phi?.values ?? null],
      ...[this.#scores, this.#capacity, this.records],
    );
  }

  /** The best blocks of every share, by the scores of `see`. */
  rank({ positions }: StepBuffers, overlap: boolean): void {
    const { records, important, candidates } = this;
    this.#code.launch(
      'step_rank',
      this.#launched(this.#rankBytes, overlap),
      ...[positions, this.#scores, this.#capacity, records, important, candidates],
    );
  }

  free(): void {
    for (const tensor of [this.#scores, this.records, this.important, this.candidates]) tensor.free();
  }

  #launched(shared: number, overlap: boolean): LaunchShape {
    return { grid: this.#grid, block: 32 * WARPS, shared, overlap };
  }
}
