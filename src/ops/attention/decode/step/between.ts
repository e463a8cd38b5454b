/** The linear layers between two attentions of a decode step in one launch (between.cu), for few sequences. */
import { type CudaCode, type CudaRuntime, f32 } from '../../../../device/cuda/runtime.js';
import type { Device } from '../../../../device/device.js';
import { Tensor } from '../../../../tensor/tensor.js';

const SOURCE = new URL('./between.cu', import.meta.url);
const THREADS = 256;
/** Sequences that the kernel takes at most. */
const MOST_ROWS = 32;
/** Rows of a weight in a tile, and pairs of neighbours among the results of a tile. */
const TILE = 8;
const PAIRS = TILE / 2;
/** 16-byte pieces of all weights that the registers of a thread hold, with up to eight sequences and with more. */
const MOST_PIECES = { few: 36, many: 30 };
/** Tiles of one weight times rows of x at most, by the shared memory for their sums (512 bytes each). */
const MOST_SUMS = 256;
/** Kernels overlap from this architecture on; before it, weights would not be loaded while attention runs. */
const ARCHITECTURE = 90;

/** Sizes of a model's layers. */
export interface LayerSizes {
  readonly layers: number;
  readonly dim: number;
  /** heads * dv */
  readonly attended: number;
  readonly hidden: number;
  readonly isGated: boolean;
  /** Rows of the fused projection, and of the gate. */
  readonly projection: number;
  readonly gate: number;
}

/** Weights of one layer, and of the projection of the next one. */
export interface BetweenWeights {
  readonly out: Tensor;
  readonly norm: Tensor;
  readonly up: Tensor;
  readonly down: Tensor;
  /** Null after the last layer. */
  readonly next: {
    readonly norm: Tensor;
    readonly projection: Tensor;
    readonly gate: Tensor | null;
  } | null;
}

export interface BetweenTensors {
  /** bf16 [batch, heads * dv]: the result of attention. */
  readonly attended: Tensor;
  /** bf16 [batch, dim]: the residual stream, updated in place. */
  readonly x: Tensor;
  /** bf16 [batch, rows of the fused projection] and f32 [batch, rows of the gate] of the next layer. */
  readonly projection: Tensor;
  readonly gateLogits: Tensor;
}

/** Blocks of the launch, groups of eight sequences, and tiles of each weight in a block. */
interface BetweenPlan {
  readonly octets: number;
  readonly blocks: number;
  readonly out: number;
  readonly up: number;
  readonly down: number;
  readonly next: number;
}

/**
 * A plan with `blocks` blocks; null if their registers do not hold the weights. One block fits on a multiprocessor, and all
 * blocks must run at the same time.
 */
function planFor(sizes: LayerSizes, batch: number, blocks: number): BetweenPlan | null {
  if (blocks < 1) return null;
  const octets = 2 ** Math.ceil(Math.log2(Math.ceil(batch / 8)));
  const { dim, attended, hidden, isGated, projection, gate } = sizes;
  const share = (rows: number, more = 0) => Math.ceil((Math.ceil(rows / TILE) + Math.ceil(more / TILE)) / blocks);
  const halves = isGated ? 2 : 1;
  const plan = {
    octets,
    blocks,
    out: share(dim),
    up: halves * share(hidden),
    down: share(dim),
    next: share(projection, gate),
  };
  const pieces = (tiles: number, inputs: number) => tiles * Math.ceil(inputs / THREADS);
  const all = pieces(plan.out, attended) + pieces(plan.up, dim) + pieces(plan.down, hidden) + pieces(plan.next, dim);
  const most = Math.max(plan.out, plan.up, plan.down, plan.next);
  // A thread holds the residual of one pair of results.
  const residuals = 8 * octets * PAIRS * Math.max(plan.out, plan.down);
  const fits =
    all <= (octets === 1 ? MOST_PIECES.few : MOST_PIECES.many) &&
    8 * octets * most <= MOST_SUMS &&
    residuals <= THREADS;
  return fits ? plan : null;
}

export class StepBetween {
  readonly #code: CudaCode;
  readonly #plan: BetweenPlan;
  readonly #layers: number;
  readonly #batch: number;
  /** bf16 [layers, batch, 2 dim + hidden]: numbers on their way between blocks, all ones while they are not there. */
  readonly #exchange: Tensor;

  private constructor(cuda: Device & CudaRuntime, sizes: LayerSizes, batch: number, plan: BetweenPlan) {
    const { layers, dim, attended, hidden, isGated } = sizes;
    this.#plan = plan;
    this.#layers = layers;
    this.#batch = batch;
    this.#code = cuda.compile(SOURCE, {
      DIM: dim,
      ATTENDED: attended,
      HIDDEN: hidden,
      GATED: isGated ? 1 : 0,
      OUT_TILES: plan.out,
      UP_TILES: plan.up,
      DOWN_TILES: plan.down,
      NEXT_TILES: plan.next,
      OCTETS: plan.octets,
    });
    this.#exchange = Tensor.empty(cuda, [layers, batch * (2 * dim + hidden)], 'bf16');
    this.#exchange.writeBytes(new Uint8Array(this.#exchange.bytes).fill(0xff));
  }

  /**
   * The launches of a step of `batch` sequences whose attention has `attentionBlocks` blocks; null if linear.cu must compute
   * its layers one by one.
   */
  static create(
    cuda: Device & CudaRuntime,
    sizes: LayerSizes,
    batch: number,
    attentionBlocks: number,
  ): StepBetween | null {
    // The exchange of a layer is emptied by the next layer, so that there must be two.
    if (batch > MOST_ROWS || sizes.layers < 2 || cuda.architecture < ARCHITECTURE) return null;
    // Beside attention its weights are loaded meanwhile; otherwise a part of the blocks begins after attention.
    const plan =
      planFor(sizes, batch, cuda.multiprocessors - attentionBlocks) ?? planFor(sizes, batch, cuda.multiprocessors);
    return plan && new StepBetween(cuda, sizes, batch, plan);
  }

  launch(layer: number, weights: BetweenWeights, tensors: BetweenTensors, epsilon: number, overlap: boolean): void {
    const { out, norm, up, down, next } = weights;
    const { attended, x, projection, gateLogits } = tensors;
    const gate = next?.gate ?? null;
    const exchangeOf = (of: number) => this.#exchange.rows(of, of + 1);
    this.#code.launch(
      'step_between',
      { grid: this.#plan.blocks, block: THREADS, shared: this.#code.constant('step_between_shared'), overlap },
      ...[attended, x, out, norm, f32(epsilon), up, down, next?.norm ?? null],
      ...[next?.projection ?? null, next?.projection.shape[0] ?? 0, projection],
      ...[gate, gate?.shape[0] ?? 0, gateLogits],
      ...[exchangeOf(layer), exchangeOf((layer + this.#layers - 1) % this.#layers), this.#batch],
    );
  }

  free(): void {
    this.#exchange.free();
  }
}
