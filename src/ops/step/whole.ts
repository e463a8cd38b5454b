/**
 * A whole decode step in one launch (whole.cu): every multiprocessor has one block that stays for all layers. For models
 * with sparse attention and heads of up to 64, and up to 32 sequences; the others are stepped kernel by kernel (step.ts).
 */
import { type CudaCode, type CudaRuntime, f32, type Macros } from '../../device/cuda/runtime.js';
import type { Addressable, Device } from '../../device/device.js';
import { Tensor } from '../../tensor/tensor.js';
import { type StepShape, stepMacros } from './shape.js';
import type { StepGate } from './step.js';

const SOURCE = new URL('./whole.cu', import.meta.url);

/** Warps of a block, rows of a tile of the batch and of the weights, 16-byte pieces of weights that a thread holds at most. */
const WARPS = 12;
const BATCH_TILE = 16;
const WEIGHT_TILE = 8;
const MOST_PIECES = 16;
const MOST_TILES = 4;
const MOST_BATCH = 32;
const LARGEST_HEAD = 64;
/** Columns of a piece of 16 bytes times the four lanes that share a row. */
const PIECE = 32;
/** Shares of the compressed keys of one (sequence, group), and parts of the rest of its attention (whole-attention.cuh). */
const SHARES = { least: 12, most: 16 };
const MOST_PARTS = 4;
/** The barrier's count has a line of its own (whole.cuh). */
const COUNTERS_APART = 32;
/** Keys of a unit. */
const UNIT = 32;

/** Parts of a step, to be timed one by one. */
export const WHOLE_PARTS = { selection: 1, selected: 2, window: 4, compressed: 8, linear: 16, all: 31 } as const;

export interface WholeSizes {
  readonly dim: number;
  readonly hidden: number;
  readonly activation: 'silu' | 'swiglu';
  /** Rows of the embedding and of the head. */
  readonly vocabulary: number;
  readonly layers: number;
}

/** Other builds and partitions than the usual ones, for measurements. */
export interface WholeTuning {
  readonly macros?: Macros;
  readonly shares?: number;
  readonly parts?: number;
}

/** Why a step cannot be one launch, in words; null when it can. The caller has asked `stepRefusal`. */
export function wholeRefusal({ heads, sparse }: StepShape, { dim, hidden }: WholeSizes, batch: number): string | null {
  if (!sparse) return 'dense attention';
  if (batch > MOST_BATCH) return `more than ${MOST_BATCH} sequences`;
  if (Math.max(heads.dk, heads.dv) > LARGEST_HEAD) return `heads of more than ${LARGEST_HEAD}`;
  const widest = Math.max(dim, hidden, heads.heads * heads.dv);
  return piecesOf(widest) > MOST_PIECES ? `a layer of ${widest} inputs` : null;
}

/** Pieces of one row of weights that a thread holds. */
function piecesOf(inputs: number): number {
  return Math.ceil(inputs / PIECE / WARPS);
}

/** What one layer needs. Places: of the layer in a page of each kind. */
export interface WholeLayer {
  readonly attentionNorm: Tensor;
  readonly projection: Tensor;
  readonly gate: Tensor;
  readonly gateBias: Tensor;
  readonly out: Tensor;
  readonly mlpNorm: Tensor;
  readonly up: Tensor;
  readonly down: Tensor;
  readonly phi: { readonly keys: Tensor; readonly values: Tensor } | null;
  readonly places: { readonly cmp: number; readonly sel: number; readonly win: number; readonly tail: number };
  readonly selected: Tensor;
  readonly reads: Tensor;
}

/** Buffers of a step that its owner has too. */
export interface WholeBuffers {
  readonly table: Tensor;
  readonly frequencies: Tensor;
  readonly norm: Tensor;
  readonly head: Tensor;
  readonly ids: Tensor;
  readonly positions: Tensor;
  readonly next: Tensor;
  readonly rotations: Tensor;
  readonly x: Tensor;
  readonly middle: Tensor;
  readonly projection: Tensor;
  readonly attended: Tensor;
  readonly active: Tensor;
  readonly gateLogits: Tensor;
  readonly logits: Tensor;
  readonly tables: { readonly cmp: Tensor; readonly sel: Tensor; readonly win: Tensor; readonly tail: Tensor };
}

export class WholeStep {
  readonly #code: CudaCode;
  readonly #sizes: WholeSizes;
  readonly #batch: number;
  readonly #blocks: number;
  readonly #capacity: number;
  readonly #shares: number;
  readonly #parts: number;
  readonly #shared: number;
  readonly #counters: Tensor;
  readonly #layers: Tensor;
  readonly #step: Tensor;
  readonly #work: readonly Tensor[];
  /** What the device knows of addresses. */
  #known = '';

  /** `capacity`: compressed keys, a multiple of 32. */
  constructor(
    device: Device & CudaRuntime,
    shape: StepShape,
    sizes: WholeSizes,
    batch: number,
    capacity: number,
    tuning: WholeTuning = {},
  ) {
    const { heads, sparse } = shape;
    if (!sparse) throw new Error('a whole step needs sparse attention');
    const blocks = device.multiprocessors;
    const pairs = batch * heads.groups;
    const between = (low: number, high: number) => Math.max(low, Math.min(high, Math.floor(blocks / pairs)));
    this.#sizes = sizes;
    this.#batch = batch;
    this.#blocks = blocks;
    this.#capacity = capacity;
    this.#shares = tuning.shares ?? between(SHARES.least, SHARES.most);
    this.#parts = tuning.parts ?? between(1, MOST_PARTS);
    const macros = { ...stepMacros(shape), ...tileMacros(shape, sizes, batch, blocks), ...tuning.macros };
    this.#code = device.compile(SOURCE, macros);
    const selectionBlocks = Math.ceil((capacity * sparse.d + sparse.l) / sparse.lSel) + 1;
    const constant = (name: string) => this.#code.constant(`step_whole_${name}`);
    this.#shared = constant('front') + sizes.layers * constant('layer') + constant('shared') + 8 * selectionBlocks;
    const perPair = heads.heads / heads.groups;
    const record = perPair * (2 + heads.dv);
    const floats = (count: number) => Tensor.zeros(device, [count], 'f32');
    this.#counters = Tensor.zeros(device, [COUNTERS_APART + sizes.layers * (1 + 2 * pairs)], 'i32');
    this.#layers = Tensor.zeros(device, [(sizes.layers * constant('layer')) / 8], 'f64');
    this.#step = Tensor.zeros(device, [constant('step') / 8], 'f64');
    this.#work = [
      floats(pairs * (this.#shares + 1) * (record + 1)),
      floats(pairs * perPair * capacity),
      floats((pairs * perPair * capacity) / UNIT),
      floats(pairs * perPair * heads.dv),
      floats(pairs * this.#parts * (2 * record + 2)),
      floats(blocks * batch),
      Tensor.zeros(device, [blocks * batch], 'i32'),
    ];
  }

  /**
   * Launches the step, or `parts` of it (WHOLE_PARTS) for a measurement. `vocabulary`: the next token is one of the first so
   * many. The same addresses must be given for every launch that is recorded.
   */
  launch(
    layers: readonly WholeLayer[],
    buffers: WholeBuffers,
    gate: StepGate,
    options: { epsilon: number; ropeScale: number; vocabulary: number; parts?: number },
  ): void {
    this.#tell(layers, buffers);
    const kind = { sigmoid: 0, softmax: 1, fixed: 2 }[gate.kind];
    this.#code.launch(
      'step_whole',
      {
        ...{ grid: this.#blocks, block: this.#code.constant('step_whole_threads'), shared: this.#shared },
        cooperative: true,
      },
      ...[this.#layers, this.#step, this.#counters, layers.length, this.#batch, this.#shares, this.#parts],
      ...[this.#capacity, f32(options.epsilon), f32(options.ropeScale), kind, f32(gate.temperature)],
      ...[...gate.weights.map(f32), this.#sizes.vocabulary, options.vocabulary, options.parts ?? WHOLE_PARTS.all],
    );
  }

  free(): void {
    for (const tensor of [this.#counters, this.#layers, this.#step, ...this.#work]) tensor.free();
  }

  /** Writes addresses to the device when they have changed: before the first launch. */
  #tell(layers: readonly WholeLayer[], b: WholeBuffers): void {
    const at = (of: Addressable | null) => of?.pointer ?? 0n;
    // In the order of Layer and Step in whole-attention.cuh.
    const perLayer = layers.flatMap((layer) => [
      ...[layer.attentionNorm, layer.projection, layer.gate, layer.gateBias, layer.out].map(at),
      ...[layer.mlpNorm, layer.up, layer.down, layer.phi?.keys ?? null, layer.phi?.values ?? null].map(at),
      ...[layer.places.cmp, layer.places.sel, layer.places.win, layer.places.tail].map(BigInt),
      ...[layer.selected, layer.reads].map(at),
    ]);
    const step = [
      ...[b.table, b.frequencies, b.norm, b.head, b.ids, b.positions, b.next, b.rotations, b.x, b.middle],
      ...[b.projection, b.attended, b.active, b.gateLogits, b.logits],
      ...[b.tables.cmp, b.tables.sel, b.tables.win, b.tables.tail, ...this.#work],
    ].map(at);
    const told = [...perLayer, ...step].join();
    if (told === this.#known) return;
    write(this.#layers, perLayer);
    write(this.#step, step);
    this.#known = told;
  }
}

function write(into: Tensor, words: readonly bigint[]): void {
  if (words.length !== into.shape[0]) throw new Error(`${words.length} numbers for ${into.shape[0]} of the kernel`);
  into.writeBytes(new Uint8Array(BigUint64Array.from(words).buffer));
}

/** Tiles of eight rows that a block takes of each weight at a time: all of its share where that is few. */
function tileMacros({ heads }: StepShape, sizes: WholeSizes, batch: number, blocks: number) {
  const { dim, hidden, activation } = sizes;
  const tiles = (rows: number, inputs: number) =>
    Math.max(
      1,
      Math.min(
        MOST_TILES,
        Math.ceil(Math.ceil(rows / WEIGHT_TILE) / blocks),
        Math.floor(MOST_PIECES / piecesOf(inputs)),
      ),
    );
  const width = heads.heads * heads.dk + 3 * heads.groups * (heads.dk + heads.dv);
  const up = tiles(activation === 'swiglu' ? 2 * hidden : hidden, dim);
  return {
    ...{ DIM: dim, HIDDEN: hidden, BATCH_TILES: Math.ceil(batch / BATCH_TILE) },
    PROJECTION_TILES: tiles(width + 3 * heads.heads, dim),
    OUTPUT_TILES: tiles(dim, Math.max(hidden, heads.heads * heads.dv)),
    UP_TILES: activation === 'swiglu' ? up + (up % 2) : up,
    HEAD_TILES: tiles(sizes.vocabulary, dim),
    ACTIVATION: activation === 'swiglu' ? 2 : 1,
  };
}
