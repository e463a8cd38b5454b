/**
 * One decode step of a whole model on a GPU, from token ids to logits and the argmax, for a batch of sequences. The
 * launches do not depend on the lengths of the sequences: positions, tokens and page tables are in device memory, so a
 * recorded step can be replayed for every token.
 */
import type { CudaRuntime } from '../device/cuda/runtime.js';
import { cudaRuntime } from '../device/cuda/runtime.js';
import type { Device } from '../device/device.js';
import { type StepShape, stepRefusal } from '../ops/attention/decode/step/shape.js';
import {
  type StepBuffers,
  type StepGate,
  StepKernels,
  type StepOptions,
  type StepPages,
  stepContextLimit,
  stepSharedContext,
} from '../ops/attention/decode/step/step.js';
import { operand } from '../ops/cast/op.js';
import { RotaryTable } from '../ops/rope/op.js';
import { SETTINGS, sampleRows } from '../ops/sample/op.js';
import type { Parameter } from '../tensor/parameter.js';
import { type Dtype, type Shape, Tensor } from '../tensor/tensor.js';
import type { Attention } from './attention.js';
import type { DecodeCache, PageKind } from './cache.js';
import type { Block, LanguageModel } from './language-model.js';
import { headShapeOf, hiddenSize, type ModelShape, rotaryShapeOf, sparseLayers, sparseShapeOf } from './shape.js';

export interface DecodeStepOptions extends StepOptions {
  /** Only the first `vocabulary` logits are candidates. */
  readonly vocabulary?: number;
}

/** Tiles per thread block of the linear layers, chosen so that loads in flight hide the memory latency. */
const TILES = { projection: 1, output: 1, up: 3, gatedUp: 2, head: 4 };

function stepShape(shape: ModelShape): StepShape {
  const sparse = shape.attention === 'dense' ? null : sparseShapeOf(shape);
  return { heads: headShapeOf(shape), sparse, cmpRope: shape.nsa.cmpRope, rope: shape.nsa.rope };
}

/** The reason why these kernels do not support a model; null if they do. */
export function decodeStepRefusal({ device, shape, dtype, adapters }: LanguageModel): string | null {
  if (!cudaRuntime(device)) return `the fused step runs on CUDA, not on ${device.kind}`;
  if (dtype !== 'bf16') return `the fused step computes in bf16, not in ${dtype}`;
  if (adapters.length > 0) return 'adapters that are not merged are not fused';
  if (shape.attention === 'nsa' && sparseLayers(shape).length < shape.nLayers) return 'window layers are not fused';
  if (shape.attention === 'nsa' && shape.nsa.phi === 'mlp') return 'phi mlp is not fused';
  if (shape.attention === 'nsa' && shape.nsa.sharedKv) return 'keys and values shared by the branches are not fused';
  if (shape.outBias || shape.mlpBias) return 'biases of the output projection and of the feed-forward are not fused';
  const { heads, dv } = headShapeOf(shape);
  return stepRefusal(stepShape(shape), [shape.dim, heads * dv, hiddenSize(shape)]);
}

/** Maximum context length of a step with `batch` sequences. */
export function decodeStepContext({ device, shape }: LanguageModel, batch: number, cluster?: number): number {
  return stepContextLimit(launcherOf(device), stepShape(shape), batch, cluster);
}

/** Context length up to which a step with `batch` sequences keeps all scores in shared memory, which is faster. */
export function decodeStepSharedContext({ device, shape }: LanguageModel, batch: number, cluster?: number): number {
  return stepSharedContext(launcherOf(device), stepShape(shape), batch, cluster);
}

/** The CUDA runtime of the device; the caller has checked `decodeStepRefusal`. */
function launcherOf(device: Device): Device & CudaRuntime {
  const cuda = cudaRuntime(device);
  if (!cuda) throw new Error('a fused decode step needs a CUDA device');
  return cuda;
}

export class DecodeStep {
  readonly batch: number;
  readonly context: number;
  /** i32 [batch]: the tokens to read. A step overwrites them with the argmax tokens. */
  readonly ids: Tensor;
  /** i32 [batch]: the most probable next tokens, or those that were drawn. */
  readonly next: Tensor;
  /** f32 [batch, vocabulary] */
  readonly logits: Tensor;
  /** i32 [layers, batch, groups, nSel]: the blocks that the last step selected. */
  readonly selected: Tensor;
  /** i32 [layers, batch, groups, 3]: keys that each branch read in the last step. */
  readonly reads: Tensor;
  readonly #model: LanguageModel;
  readonly #cache: DecodeCache;
  readonly #kernels: StepKernels;
  readonly #buffers: StepBuffers;
  readonly #vocabulary: number;
  readonly #tables: ReadonlyMap<PageKind, Tensor<'address'>>;
  readonly #owned: Pick<Tensor, 'free'>[] = [];
  readonly #x: readonly [Tensor, Tensor];
  readonly #gateLogits: Tensor;
  readonly #attended: Tensor;
  readonly #active: Tensor;
  readonly #rotations: RotaryTable;
  readonly #settings: Tensor;

  /** The caller has checked `decodeStepRefusal`. */
  constructor(model: LanguageModel, cache: DecodeCache, batch: number, options: DecodeStepOptions) {
    const { shape, device } = model;
    const { heads, groups, dk, dv } = headShapeOf(shape);
    const { nSel } = shape.nsa;
    const step = stepShape(shape);
    this.batch = batch;
    this.context = options.context;
    this.#model = model;
    this.#cache = cache;
    this.#vocabulary = options.vocabulary ?? shape.vocabSize;
    this.#kernels = new StepKernels(launcherOf(device), step, shape.dim, batch, options);
    this.#tables = new Map(cache.kinds.map((kind) => [kind, this.#make([batch], 'address')]));
    this.ids = this.#make([batch], 'i32');
    this.next = this.#make([batch], 'i32');
    this.logits = this.#make([batch, shape.vocabSize], 'f32');
    this.selected = this.#make([shape.nLayers, batch, groups, nSel], 'i32');
    this.reads = this.#make([shape.nLayers, batch, groups, 3], 'i32');
    const [width] = model.blocks[0].attention.projection.value.shape;
    this.#buffers = {
      projection: this.#make([batch, width], 'bf16'),
      positions: this.#make([batch], 'i32'),
      rotations: this.#make([batch, 2, dk / 2, 2], 'f32'),
    };
    this.#x = [this.#make([batch, shape.dim], 'bf16'), this.#make([batch, shape.dim], 'bf16')];
    this.#gateLogits = this.#make([batch, 3 * heads], 'f32');
    this.#attended = this.#make([batch, heads * dv], 'bf16');
    this.#active = this.#make([batch, hiddenSize(shape)], 'bf16');
    this.#rotations = new RotaryTable(device, rotaryShapeOf(shape));
    this.#settings = this.#make([batch, SETTINGS], 'f64');
  }

  /** Sets the current length of each sequence. A step increments them. */
  place(lengths: readonly number[]): void {
    this.#buffers.positions.write(lengths);
  }

  /** Sets the addresses of the sequences' page tables of one kind. */
  point(kind: PageKind, addresses: BigUint64Array): void {
    this.#tables.get(kind)?.write(addresses);
  }

  /** Launches the whole step asynchronously. */
  launch(): void {
    const { shape, embedding, blocks, norm, head } = this.#model;
    const kernels = this.#kernels;
    const [x] = this.#x;
    kernels.begin(embedding.value, this.ids, this.#rotations, x, this.#buffers);
    for (const [layer, block] of blocks.entries()) this.#launchBlock(block, layer);
    const last = { weight: norm.value, epsilon: shape.normEps };
    kernels.linear({ x, weight: operand(head, x), y: this.logits, norm: last, tiles: TILES.head });
    kernels.end(this.logits, this.#vocabulary, this.ids, this.#buffers.positions, this.next);
  }

  /** Replaces the argmax tokens of the step by draws, a row of `settings` for each sequence (`sampleRows`). */
  sample(settings: Float64Array): void {
    this.#settings.write(settings);
    const { logits, next, ids } = this;
    const cuda = launcherOf(this.#model.device);
    sampleRows(cuda, { logits, vocabulary: this.#vocabulary, settings: this.#settings, next, ids });
  }

  /** Launches only the attention of all layers, or parts of sparse attention (STEP_PARTS), for measurements. */
  launchAttention(parts?: number): void {
    for (const [layer, { attention }] of this.#model.blocks.entries()) this.#attend(attention, layer, parts);
  }

  free(): void {
    for (const tensor of this.#owned) tensor.free();
    this.#rotations.free();
    this.#kernels.free();
  }

  #launchBlock({ attentionNorm, attention, feedForwardNorm, feedForward }: Block, layer: number): void {
    const { shape } = this.#model;
    const kernels = this.#kernels;
    const [x, middle] = this.#x;
    const norm = (weight: Parameter) => ({ weight: weight.value, epsilon: shape.normEps });
    const { gate, norms, projectionBias } = attention;
    kernels.linear({
      x,
      weight: operand(attention.projection, x),
      y: this.#buffers.projection,
      tiles: TILES.projection,
      norm: norm(attentionNorm),
      ...(gate ? { also: { weight: operand(gate.weight, x), y: this.#gateLogits } } : {}),
    });
    if (projectionBias || norms) {
      const of = norms && { query: norms.query.value, key: norms.key.value, epsilon: shape.normEps };
      kernels.heads(this.#buffers.projection, projectionBias?.value ?? null, of);
    }
    this.#attend(attention, layer);
    kernels.linear({
      x: this.#attended,
      weight: operand(attention.output, x),
      y: middle,
      residual: x,
      tiles: TILES.output,
    });
    kernels.linear({
      x: middle,
      weight: operand(feedForward.up, x),
      y: this.#active,
      tiles: shape.mlp === 'swiglu' ? TILES.gatedUp : TILES.up,
      norm: norm(feedForwardNorm),
      activation: shape.mlp,
    });
    kernels.linear({
      x: this.#active,
      weight: operand(feedForward.down, x),
      y: x,
      residual: middle,
      tiles: TILES.output,
    });
  }

  #attend({ gate, phi }: Attention, layer: number, parts?: number): void {
    const of = (all: Tensor) => all.rows(layer, layer + 1);
    const outputs = { out: this.#attended, selected: of(this.selected), reads: of(this.reads) };
    const pages = this.#pages(layer);
    if (!gate) {
      this.#kernels.dense(this.#buffers, pages, outputs);
      return;
    }
    const [keys, values] = [phi?.keys.conv?.value, phi?.values.conv?.value];
    const weights = keys && values ? { keys, values } : null;
    const mix = { ...this.#gate(), logits: this.#gateLogits, bias: gate.bias.value };
    this.#kernels.attention(this.#buffers, pages, weights, mix, outputs, parts);
  }

  #gate(): StepGate {
    const { nsa } = this.#model.shape;
    const fixed = (cmp: number, sel: number, win: number): StepGate => ({
      kind: 'fixed',
      temperature: 1,
      weights: [cmp, sel, win],
    });
    if (nsa.forceUniformGate) return fixed(1 / 3, 1 / 3, 1 / 3);
    const forced = nsa.forceBranch;
    if (forced !== 'none') return fixed(Number(forced === 'cmp'), Number(forced === 'sel'), Number(forced === 'win'));
    return { kind: nsa.gate, temperature: nsa.gateTemp, weights: [0, 0, 0] };
  }

  #pages(layer: number): StepPages {
    const of = (kind: PageKind) => {
      const tables = this.#tables.get(kind);
      return tables ? this.#cache.pages(kind, layer, tables) : null;
    };
    const win = of('win');
    if (!win) throw new Error('this model has no win pages');
    return { cmp: of('cmp'), sel: of('sel'), win, tail: of('tail') };
  }

  #make<D extends Dtype | 'address'>(shape: Shape, dtype: D): Tensor<D> {
    const tensor = Tensor.zeros(this.#model.device, shape, dtype);
    this.#owned.push(tensor);
    return tensor;
  }
}
