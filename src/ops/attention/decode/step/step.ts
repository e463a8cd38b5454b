/**
 * The kernels of a decode step on CUDA in bf16: one token for each sequence, fused so that a layer is five launches.
 * All lengths are on the device, so a graph can replay the launches. See docs/explain/decoding.md.
 */
import { type CudaCode, type CudaRuntime, f32, type LaunchShape } from '../../../../device/cuda/runtime.js';
import type { Device } from '../../../../device/device.js';
import { UsageError } from '../../../../errors.js';
import { Tensor } from '../../../../tensor/tensor.js';
import { compressedCount } from '../../../common/sequences.js';
import type { RotaryTable } from '../../../rope/op.js';
import { sharedLimit } from '../../fused/plan.js';
import type { SparseShape } from '../../shape.js';
import type { Pages } from '../paged/op.js';
import { denseSplits, hasClusters, partialNumbers, type StepShape, stepCluster, stepMacros } from './shape.js';
import { isSpread, SpreadBranch } from './spread.js';

const SOURCES = {
  token: new URL('./token.cu', import.meta.url),
  linear: new URL('./linear.cu', import.meta.url),
  around: new URL('./around.cu', import.meta.url),
  attention: new URL('./attention.cu', import.meta.url),
  dense: new URL('./dense.cu', import.meta.url),
};

/** Rows of a tile of the tensor cores, and tiles of the batch that one block of linear.cu takes at most. */
const BATCH_TILE = 16;
const MAX_BATCH_TILES = 2;
/** Rows of w in a tile of linear.cu, and columns of a step. */
const WEIGHT_TILE = 8;
const INPUT_STEP = 32;
/** Tiles of a block in large batches at most, and 16-byte pieces of w in the registers of a thread at most. */
const MAX_TILES = 4;
const MAX_PIECES = 24;

/**
 * Tiles of a block in batches that several blocks share out. Each block reads its rows of x anew, which with few tiles is
 * most of the traffic; sums do not depend on it.
 */
function largeBatchTiles(inputs: number): number {
  const pieces = Math.ceil(inputs / 256);
  let tiles = MAX_TILES;
  while (tiles > 1 && tiles * pieces > MAX_PIECES) tiles /= 2;
  return tiles;
}

/**
 * Layers of a batch of two tiles. A plain one with at least `inputs` inputs has blocks of `tiles` tiles and shares out
 * its columns among the blocks of a cluster, a normed one with at least `rows` rows has `normedTiles` tiles: so blocks
 * read less of x and are still as many as the multiprocessors of an H200, on which this was measured.
 */
const WIDE_PLAN = { inputs: 2048, tiles: 3, cluster: 4, rows: 1536, normedTiles: 2 };

/**
 * Batches above these sizes multiply by cuBLASLt, with a norm and an activation of their own around it: logits and
 * other layers. Measured on an H200.
 */
const PRODUCT_BATCH = { logits: 16, layer: 128 };
/** Results that one thread of `step_activate` computes. */
const ACTIVATED = 4;
/** Layers with fewer rows than this keep their tiles in large batches. */
const FEW_ROWS = 256;

/** Heads that a block of `step_heads` takes, a warp for each. */
const WARPS_OF_HEADS = 4;

export interface StepLinear {
  readonly x: Tensor;
  /** [outputs, inputs]; with SwiGLU the gate's rows, then the others. */
  readonly weight: Tensor;
  /** bf16, or f32 for logits. */
  readonly y: Tensor;
  /** RMSNorm of x, applied first. */
  readonly norm?: { readonly weight: Tensor; readonly epsilon: number };
  readonly activation?: 'none' | 'silu' | 'swiglu';
  readonly residual?: Tensor;
  /** A second layer over the same x; its result is f32. */
  readonly also?: { readonly weight: Tensor; readonly y: Tensor };
  /** Tiles per block in small batches: more for weights with many rows. Even for SwiGLU, which has pairs of tiles. */
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

/** Buffers that the launches of a step share, allocated once for a batch. */
export interface StepBuffers {
  /** bf16 [batch, columns of the fused projection] */
  readonly projection: Tensor;
  /** i32 [batch]: tokens before the new one */
  readonly positions: Tensor;
  /** f32 [batch, 2, dk/2, 2] */
  readonly rotations: Tensor;
}

export interface StepOutputs {
  /** bf16 [batch, heads * dv] */
  readonly out: Tensor;
  /** i32 [batch, groups, n_sel]: the blocks selected. */
  readonly selected: Tensor;
  /** i32 [batch, groups, 3]: keys that each branch read; dense attention has the first. */
  readonly reads: Tensor;
}

/** Parts of sparse attention that can be timed separately. */
export const STEP_PARTS = { selection: 1, selected: 2, window: 4, compressed: 8, all: 15 } as const;

/** Compressed keys of a unit of the kernels: scores are written in whole units. */
const UNIT = 32;

export interface StepOptions {
  /** Maximum tokens per sequence. */
  readonly context: number;
  /** Each kernel starts while the previous one still runs (programmatic dependent launch). */
  readonly overlap?: boolean;
  /** Blocks of a cluster of attention, for measurements. */
  readonly cluster?: number;
  /** Whether the compressed branch has launches of its own over the whole GPU, for tests and measurements. */
  readonly spread?: boolean;
}

const FIXED_SHARED = 'step_attention_shared';

function compileAttention(
  cuda: CudaRuntime,
  shape: StepShape,
  cluster: number,
  inShared: boolean,
  spread = false,
): CudaCode {
  const own = { CLUSTER: cluster, SCORES_SHARED: inShared ? 1 : 0, ...(spread ? { SPREAD: 1 } : {}) };
  return cuda.compile(SOURCES.attention, { ...stepMacros(shape), ...own });
}

/** Shared memory to rank blocks: two numbers for every selection block, and for two more. */
const BLOCK_BYTES = 8;
const SPARE_BLOCKS = 2;
/** Candidates of a block of a cluster that are ranked without it: by each warp in small clusters, else by the block. */
const SMALL_CLUSTER = 2;
const RANKED_BY_WARPS = 1024;
const RANKED_BY_BLOCK = 256;

function rankingBytes(context: number, { l, d, lSel }: SparseShape, cluster: number): number {
  const keys = UNIT * Math.ceil(Math.ceil(compressedCount(context, l, d) / UNIT) / cluster); // of a block
  const few = cluster <= SMALL_CLUSTER ? RANKED_BY_WARPS : RANKED_BY_BLOCK;
  if (Math.ceil((keys * d) / lSel) + SPARE_BLOCKS <= few) return 0;
  return BLOCK_BYTES * (Math.ceil(context / lSel) + SPARE_BLOCKS);
}

/** Bytes of shared memory that the attention kernel leaves for ranks and scores. */
function spareShared(cuda: CudaRuntime, shape: StepShape, cluster: number): number {
  return sharedLimit(cuda.architecture) - compileAttention(cuda, shape, cluster, true).constant(FIXED_SHARED);
}

/** Tokens of context at most, by the shared memory that ranking their blocks takes: 0 if none is left. */
export function stepContextLimit(
  cuda: CudaRuntime,
  shape: StepShape,
  batch: number,
  cluster: number = stepCluster(shape, batch, cuda),
): number {
  if (!shape.sparse) return Number.POSITIVE_INFINITY;
  const { lSel } = shape.sparse;
  const spare = spareShared(cuda, shape, cluster);
  const most = lSel * Math.max(0, Math.floor(spare / BLOCK_BYTES) - SPARE_BLOCKS);
  // Longer contexts are ranked in shares, if one cluster can rank up to where that begins.
  return isSpread(shape, batch, cluster, most, undefined) ? Number.POSITIVE_INFINITY : most;
}

/** Shared memory of the scores of a block of threads, two more in a row for the banks. */
function scoreBytes({ heads, sparse }: StepShape, context: number, cluster: number): number {
  const units = Math.max(1, Math.ceil(compressedCount(context, sparse!.l, sparse!.d) / UNIT));
  return 4 * (heads.heads / heads.groups) * (UNIT * Math.ceil(units / cluster) + 2);
}

/** Tokens of context at most for which all scores stay in shared memory; 0 if there are none. */
export function stepSharedContext(
  cuda: CudaRuntime,
  shape: StepShape,
  batch: number,
  cluster: number = stepCluster(shape, batch, cuda),
): number {
  if (!shape.sparse) return Number.POSITIVE_INFINITY;
  const { sparse } = shape;
  const spare = spareShared(cuda, shape, cluster);
  const bytes = (context: number) => rankingBytes(context, sparse, cluster) + scoreBytes(shape, context, cluster);
  const step = UNIT * sparse.d * cluster; // tokens of a unit in each block
  let steps = Math.max(0, Math.floor(spare / (4 * UNIT)));
  while (steps > 0 && bytes(steps * step) > spare) steps -= 1;
  return steps * step;
}

export class StepKernels {
  readonly #shape: StepShape;
  readonly #cuda: Device & CudaRuntime;
  readonly #batch: number;
  readonly #overlap: boolean;
  readonly #token: CudaCode;
  readonly #attention: CudaCode;
  readonly #cluster: number;
  /** Capacity in compressed keys. */
  readonly #capacity: number;
  readonly #shared: number;
  /** Dense attention: partial results of the key splits. Sparse: scores that do not fit into shared memory. */
  readonly #splits: number;
  readonly #partial: Tensor | null;
  readonly #spread: SpreadBranch | null;
  readonly #scratches = new Map<string, Tensor>();

  constructor(
    cuda: Device & CudaRuntime,
    shape: StepShape,
    dim: number,
    batch: number,
    { context, overlap = true, cluster, spread }: StepOptions,
  ) {
    this.#cuda = cuda;
    this.#shape = shape;
    this.#batch = batch;
    this.#overlap = overlap;
    const macros = stepMacros(shape);
    const { heads, sparse } = shape;
    this.#token = cuda.compile(SOURCES.token, { ...macros, DIM: dim });
    this.#splits = denseSplits(shape, batch, cuda.multiprocessors);
    this.#cluster = cluster ?? stepCluster(shape, batch, cuda);
    if (!sparse) {
      this.#attention = cuda.compile(SOURCES.dense, macros);
      this.#partial = Tensor.empty(cuda, [partialNumbers(shape, batch, this.#splits)], 'f32');
      this.#capacity = 0;
      this.#shared = 0;
      this.#spread = null;
      return;
    }
    const units = Math.max(1, Math.ceil(compressedCount(context, sparse.l, sparse.d) / UNIT));
    this.#capacity = UNIT * units;
    if (isSpread(shape, batch, this.#cluster, context, spread)) {
      this.#spread = new SpreadBranch(cuda, shape, batch, context, this.#capacity);
      this.#attention = compileAttention(cuda, shape, this.#cluster, false, true);
      this.#shared = this.#attention.constant(FIXED_SHARED);
      this.#partial = null;
      return;
    }
    this.#spread = null;
    const compile = (inShared: boolean) => compileAttention(cuda, shape, this.#cluster, inShared);
    const always = rankingBytes(context, sparse, this.#cluster);
    const scores = scoreBytes(shape, context, this.#cluster);
    const fixed = compile(true).constant(FIXED_SHARED);
    const limit = sharedLimit(cuda.architecture);
    if (fixed + always > limit)
      throw new UsageError(
        `a step with ${context} tokens of context needs ${fixed + always} bytes of shared memory to rank blocks, ` +
          `and this GPU has ${limit}`,
      );
    const fits = fixed + always + scores <= limit;
    this.#attention = compile(fits);
    this.#shared = fixed + always + (fits ? scores : 0);
    this.#partial = fits ? null : Tensor.empty(cuda, [batch * heads.heads * this.#capacity], 'f32');
  }

  free(): void {
    for (const tensor of this.#scratches.values()) tensor.free();
    this.#partial?.free();
    this.#spread?.free();
  }

  /** x [batch, dim] = rows `ids` of the table; the rotations of the tokens' positions. */
  begin(
    table: Tensor,
    ids: Tensor,
    { frequencies, scale, amplitude }: RotaryTable,
    x: Tensor,
    { positions, rotations }: StepBuffers,
  ): void {
    const shape = { grid: this.#batch, block: 256 }; // waits for everything launched before the step
    this.#token.launch(
      'step_begin',
      shape,
      ...[table, ids, positions, frequencies, f32(scale), f32(amplitude), x, rotations, table.shape[0]],
    );
  }

  linear(layer: StepLinear): void {
    const { logits, layer: other } = PRODUCT_BATCH;
    const isProduct = this.#batch > (layer.y.dtype === 'f32' ? logits : other) && layer.y.shape[1] % ACTIVATED === 0;
    if (isProduct) this.#product(layer);
    else this.#fused(layer);
  }

  /** A norm, a product of cuBLASLt and an activation: three launches. */
  #product({ x, weight, y, norm, activation = 'none', residual, also }: StepLinear): void {
    const [rows, inputs] = weight.shape;
    const around = this.#cuda.compile(SOURCES.around, {});
    const normed = norm ? this.#scratch('normed', inputs) : x;
    if (norm) {
      const shape = this.#launched([this.#batch, 1, 1], 128);
      around.launch('step_norm', shape, x, norm.weight, f32(norm.epsilon), normed, inputs);
    }
    const isGated = activation === 'swiglu';
    const into = isGated ? this.#scratch('gated', rows) : y;
    const size = { m: this.#batch, n: rows, k: inputs, transposeB: true };
    this.#cuda.matrixProduct({ a: normed, b: weight, c: residual ?? null, d: into, ...size });
    if (activation !== 'none') {
      const results = isGated ? rows / 2 : rows;
      const count = this.#batch * results;
      const shape = this.#launched([Math.ceil(count / (256 * ACTIVATED)), 1, 1], 256);
      around.launch('step_activate', shape, into, y, results, isGated ? 1 : 0, count);
    }
    if (also) this.#fused({ x, weight: also.weight, y: also.y, ...(norm ? { norm } : {}), tiles: 1 });
  }

  /** Numbers between two launches, bf16 [batch, width], allocated at their first use. */
  #scratch(name: string, width: number): Tensor {
    const key = `${name} ${width}`;
    const known = this.#scratches.get(key);
    if (known) return known;
    const made = Tensor.empty(this.#cuda, [this.#batch, width], 'bf16');
    this.#scratches.set(key, made);
    return made;
  }

  /** Tiles of a block of linear.cu, and blocks of a cluster that share out the columns of x. */
  #linearPlan(rows: number, inputs: number, fewest: number, isPlain: boolean): { tiles: number; cluster: number } {
    const plan = WIDE_PLAN;
    if (rows <= FEW_ROWS || this.#batch <= BATCH_TILE) return { tiles: fewest, cluster: 1 };
    if (this.#batch > MAX_BATCH_TILES * BATCH_TILE)
      return { tiles: Math.max(fewest, largeBatchTiles(inputs)), cluster: 1 };
    const isShared = isPlain && inputs >= plan.inputs && inputs % (INPUT_STEP * plan.cluster) === 0;
    if (isShared && hasClusters(this.#cuda)) return { tiles: plan.tiles, cluster: plan.cluster };
    if (!isPlain && rows >= plan.rows) return { tiles: Math.max(fewest, plan.normedTiles), cluster: 1 };
    return { tiles: fewest, cluster: 1 };
  }

  /** One launch of linear.cu. */
  #fused({ x, weight, y, norm, activation = 'none', residual, also, tiles: fewest }: StepLinear): void {
    const [rows, inputs] = weight.shape;
    const batchTiles = Math.min(MAX_BATCH_TILES, Math.ceil(this.#batch / BATCH_TILE));
    const isPlain = !norm && !also && activation === 'none';
    const { tiles, cluster } = this.#linearPlan(rows, inputs, fewest, isPlain);
    if (activation === 'swiglu' && tiles % 2 !== 0) throw new Error(`SwiGLU has pairs of tiles, not ${tiles} of them`);
    const results = activation === 'swiglu' ? rows / 2 : rows;
    const count = (of: number) => Math.ceil(of / WEIGHT_TILE);
    const all = count(results) * (activation === 'swiglu' ? 2 : 1) + count(also?.weight.shape[0] ?? 0);
    const code = this.#cuda.compile(SOURCES.linear, {
      CLUSTER: cluster,
      INPUTS: inputs,
      BATCH_TILES: batchTiles,
      TILES: tiles,
      NORM: norm ? 1 : 0,
      ACTIVATION: { none: 0, silu: 1, swiglu: 2 }[activation],
      OUTPUT: y.dtype,
    });
    code.launch(
      'step_linear',
      this.#launched(
        [cluster * Math.ceil(all / tiles), Math.ceil(this.#batch / (batchTiles * BATCH_TILE)), 1],
        256,
        code.constant('step_linear_shared'),
      ),
      ...[x, norm?.weight ?? null, f32(norm?.epsilon ?? 0), weight, results, y],
      ...[also?.weight ?? null, also?.weight.shape[0] ?? 0, also?.y ?? null, residual ?? null, this.#batch],
    );
  }

  /** Adds `bias` f32 [columns] to the rows of the fused projection, then normalises its query and key heads in place. */
  heads(
    projection: Tensor,
    bias: Tensor | null,
    norms: { readonly query: Tensor; readonly key: Tensor; readonly epsilon: number } | null,
  ): void {
    const { heads, groups } = this.#shape.heads;
    const branches = this.#shape.sparse ? 3 : 1;
    const warps = heads + 2 * branches * groups;
    this.#token.launch(
      'step_heads',
      this.#launched([Math.ceil(warps / WARPS_OF_HEADS), this.#batch, 1], 32 * WARPS_OF_HEADS),
      ...[projection, bias, norms?.query ?? null, norms?.key ?? null, f32(norms?.epsilon ?? 0), branches],
    );
  }

  /**
   * The new tokens go into the cache, and their heads attend to it. `phi`: the weights of phi conv; `logits` f32
   * [batch, 3 heads] and `bias` of the gate. `parts` (STEP_PARTS): for a measurement.
   */
  attention(
    buffers: StepBuffers,
    pages: StepPages,
    phi: { readonly keys: Tensor; readonly values: Tensor } | null,
    gate: StepGate & { readonly logits: Tensor | null; readonly bias: Tensor | null },
    outputs: StepOutputs,
    parts: number = STEP_PARTS.all,
  ): void {
    const { groups } = this.#shape.heads;
    const { projection, positions, rotations } = buffers;
    const kind = { sigmoid: 0, softmax: 1, fixed: 2 }[gate.kind];
    const spread = this.#spread;
    if (parts & STEP_PARTS.compressed) spread?.see(buffers, pages, phi, this.#overlap);
    if (parts & STEP_PARTS.selection) spread?.rank(buffers, this.#overlap);
    this.#attention.launch(
      'step_attention',
      this.#launched([this.#cluster, groups, this.#batch], 256, this.#shared),
      ...[projection, gate.logits, gate.bias, positions, rotations],
      ...[pages.cmp, pages.sel, pages.win, pages.tail].flatMap((of) => [of?.tables ?? null, of?.place ?? 0]),
      ...[phi?.keys ?? null, phi?.values ?? null, this.#partial, this.#capacity],
      ...[spread?.records ?? null, spread?.important ?? null, spread?.candidates ?? null, kind, f32(gate.temperature)],
      ...[...gate.weights.map(f32), outputs.selected, outputs.reads, outputs.out, parts],
    );
  }

  /** Attention of a dense model. */
  dense({ projection, positions, rotations }: StepBuffers, { win }: StepPages, { out, reads }: StepOutputs): void {
    const { heads, groups } = this.#shape.heads;
    this.#attention.launch(
      'step_dense',
      this.#launched([this.#splits + 1, groups, this.#batch], 128),
      ...[projection, positions, rotations, win.tables, win.place, this.#partial, this.#splits],
    );
    const shape = this.#launched([heads / groups, groups, this.#batch], 128);
    this.#attention.launch('step_merge', shape, this.#partial, this.#splits, reads, out);
  }

  /**
   * The most probable token of each row of `logits` [batch, width], among the first `vocabulary`, into `next` and
   * `ids`; positions advance.
   */
  end(logits: Tensor, vocabulary: number, ids: Tensor, positions: Tensor, next: Tensor): void {
    const shape = this.#launched([this.#batch, 1, 1], 1024);
    this.#token.launch('step_end', shape, logits, logits.shape[1], vocabulary, ids, positions, next);
  }

  #launched(grid: readonly [number, number, number], block: number, shared = 0): LaunchShape {
    return { grid, block, shared, overlap: this.#overlap };
  }
}
