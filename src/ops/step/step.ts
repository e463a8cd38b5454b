/**
 * The kernels of a decode step on CUDA in bf16: one token for each sequence, fused so that a layer is six launches, all
 * lengths on the device, nothing that a graph could not replay. docs/decoding.md has the plan.
 */
import { type CudaCode, type CudaRuntime, f32, type LaunchShape } from '../../device/cuda/runtime.js';
import type { Tensor } from '../../tensor/tensor.js';
import type { Pages } from '../paged/op.js';
import { type StepShape, stepCluster, stepMacros, stepSplits } from './shape.js';

const SOURCES = {
  token: new URL('./token.cu', import.meta.url),
  linear: new URL('./linear.cu', import.meta.url),
  compressed: new URL('./compressed.cu', import.meta.url),
  attend: new URL('./attend.cu', import.meta.url),
};

/** Rows of a tile of the tensor cores, and tiles of the batch that one block of linear.cu takes at most. */
const BATCH_TILE = 16;
const MOST_BATCH_TILES = 2;
/** Rows of w in a tile of linear.cu. */
const WEIGHT_TILE = 8;

export interface StepLinear {
  readonly x: Tensor;
  /** [outputs, inputs]; with SwiGLU the gate's rows, then the others. */
  readonly weight: Tensor;
  /** bf16, or f32 for logits. */
  readonly y: Tensor;
  /** x is normed first. */
  readonly norm?: { readonly weight: Tensor; readonly epsilon: number };
  readonly activation?: 'none' | 'silu' | 'swiglu';
  readonly residual?: Tensor;
  /** A second layer over the same x; its result is f32. */
  readonly also?: { readonly weight: Tensor; readonly y: Tensor };
  /** Tiles of a block: more for a weight of very many rows. */
  readonly tiles: number;
}

/** One layer's places in the cache. */
export interface StepPages {
  readonly cmp: Pages | null;
  readonly sel: Pages | null;
  readonly win: Pages;
  readonly tail: Pages | null;
}

export interface StepGate {
  /** `fixed`: the three numbers of `weights`. */
  readonly kind: 'softmax' | 'sigmoid' | 'fixed';
  readonly temperature: number;
  readonly weights: readonly [number, number, number];
}

/** What the two halves of attention share, made once for a batch. */
export interface StepBuffers {
  /** bf16 [batch, columns of the fused projection] */
  readonly projection: Tensor;
  /** i32 [batch]: tokens before the new one */
  readonly positions: Tensor;
  /** f32 [batch, 2, dk/2, 2] */
  readonly rotations: Tensor;
  readonly partial: Tensor;
  /** f32 [batch, heads, capacity]; null for dense attention */
  readonly scores: Tensor | null;
}

/** Parts of the second half of attention, to be timed one by one. */
export const STEP_PARTS = { selection: 1, selected: 2, window: 4, all: 7 } as const;

export class StepKernels {
  readonly splits: number;
  readonly #shape: StepShape;
  readonly #cuda: CudaRuntime;
  readonly #batch: number;
  readonly #cluster: number;
  readonly #overlap: boolean;
  readonly #token: CudaCode;
  readonly #compressed: CudaCode;
  readonly #attend: CudaCode;

  constructor(cuda: CudaRuntime, shape: StepShape, dim: number, batch: number, overlap = true) {
    this.#cuda = cuda;
    this.#shape = shape;
    this.#batch = batch;
    this.#overlap = overlap;
    this.splits = stepSplits(shape, batch, cuda.multiprocessors);
    this.#cluster = stepCluster(shape, batch, cuda.architecture);
    const macros = stepMacros(shape);
    this.#token = cuda.compile(SOURCES.token, { ...macros, DIM: dim });
    this.#compressed = cuda.compile(SOURCES.compressed, macros);
    this.#attend = cuda.compile(SOURCES.attend, { ...macros, CLUSTER: this.#cluster });
  }

  /** x [batch, dim] = rows `ids` of the table; the rotations of the tokens' positions. */
  begin(
    table: Tensor,
    ids: Tensor,
    frequencies: Tensor,
    ropeScale: number,
    x: Tensor,
    { positions, rotations }: StepBuffers,
  ): void {
    const shape = { grid: this.#batch, block: 256 }; // waits for all that was launched before the step
    this.#token.launch(
      'step_begin',
      shape,
      ...[table, ids, positions, frequencies, f32(ropeScale), x, rotations, table.shape[0]],
    );
  }

  linear({ x, weight, y, norm, activation = 'none', residual, also, tiles }: StepLinear): void {
    const [rows, inputs] = weight.shape;
    const batchTiles = Math.min(MOST_BATCH_TILES, Math.ceil(this.#batch / BATCH_TILE));
    const results = activation === 'swiglu' ? rows / 2 : rows;
    const count = (of: number) => Math.ceil(of / WEIGHT_TILE);
    const all = count(results) * (activation === 'swiglu' ? 2 : 1) + count(also?.weight.shape[0] ?? 0);
    const code = this.#cuda.compile(SOURCES.linear, {
      ...{ INPUTS: inputs, BATCH_TILES: batchTiles, TILES: tiles, NORM: norm ? 1 : 0 },
      ...{ ACTIVATION: { none: 0, silu: 1, swiglu: 2 }[activation], OUTPUT: y.dtype },
    });
    code.launch(
      'step_linear',
      this.#launched([Math.ceil(all / tiles), Math.ceil(this.#batch / (batchTiles * BATCH_TILE)), 1], 256),
      ...[x, norm?.weight ?? null, f32(norm?.epsilon ?? 0), weight, results, y],
      ...[also?.weight ?? null, also?.weight.shape[0] ?? 0, also?.y ?? null, residual ?? null, this.#batch],
    );
  }

  /** The new tokens go into the cache and see the compressed keys. `phi`: the weights of phi conv. */
  compressed(buffers: StepBuffers, pages: StepPages, phi: { keys: Tensor; values: Tensor } | null): void {
    const { groups } = this.#shape.heads;
    this.#compressed.launch(
      'step_compressed',
      this.#launched([this.splits + 1, groups, this.#batch], 128),
      ...[buffers.projection, buffers.positions, buffers.rotations],
      ...[pages.cmp, pages.sel, pages.win, pages.tail].flatMap((of) => [of?.tables ?? null, of?.place ?? 0]),
      ...[phi?.keys ?? null, phi?.values ?? null, buffers.partial, buffers.scores, capacityOf(buffers), this.splits],
    );
  }

  /**
   * `logits` f32 [batch, 3 heads] and `bias` of the gate → `out` bf16 [batch, heads * dv]; the blocks selected, i32 [batch,
   * groups, n_sel], and the keys that each branch read, i32 [batch, groups, 3].
   */
  attend(
    buffers: StepBuffers,
    pages: StepPages,
    gate: StepGate & { readonly logits: Tensor | null; readonly bias: Tensor | null },
    outputs: { readonly out: Tensor; readonly selected: Tensor; readonly reads: Tensor | null },
    parts: number = this.#shape.sparse ? STEP_PARTS.all : 0,
  ): void {
    const { groups } = this.#shape.heads;
    const kind = { sigmoid: 0, softmax: 1, fixed: 2 }[gate.kind];
    const [cmp, sel, win] = gate.weights.map(f32);
    this.#attend.launch(
      'step_attend',
      this.#launched([this.#cluster, groups, this.#batch], 256, this.#attendShared(capacityOf(buffers))),
      ...[buffers.projection, gate.logits, gate.bias, buffers.positions, buffers.rotations],
      ...[pages.sel, pages.win].flatMap((of) => [of?.tables ?? null, of?.place ?? 0]),
      ...[buffers.partial, buffers.scores, capacityOf(buffers), this.splits, kind, f32(gate.temperature)],
      ...[cmp, sel, win, outputs.selected, outputs.reads, outputs.out, parts],
    );
  }

  /**
   * The most probable token of each row of `logits` [batch, width], among the first `vocabulary`, into `next` and `ids`;
   * positions advance.
   */
  end(logits: Tensor, vocabulary: number, ids: Tensor, positions: Tensor, next: Tensor): void {
    const shape = this.#launched([this.#batch, 1, 1], 1024);
    this.#token.launch('step_end', shape, logits, logits.shape[1], vocabulary, ids, positions, next);
  }

  /** With room for the importance of every selection block. */
  #attendShared(capacity: number): number {
    const { sparse } = this.#shape;
    const blocks = sparse ? Math.ceil((capacity * sparse.d + sparse.l) / sparse.lSel) + 1 : 0;
    return this.#attend.constant('step_attend_shared') + 4 * blocks;
  }

  #launched(grid: readonly [number, number, number], block: number, shared = 0): LaunchShape {
    return { grid, block, shared, overlap: this.#overlap };
  }
}

function capacityOf({ scores }: StepBuffers): number {
  return scores?.shape[2] ?? 0;
}
