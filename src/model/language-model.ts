/**
 * A decoder-only language model: embedding, blocks of attention and feed-forward with RMSNorm before each and a
 * residual around it, a last norm, and the head (its own matrix, or the embedding's when tied).
 */

import type { Device } from '../device/device.js';
import { UsageError } from '../errors.js';
import { silu, swiglu } from '../ops/activation/op.js';
import { validateShapes } from '../ops/attention/shape.js';
import { operand } from '../ops/cast/op.js';
import { linearCrossEntropy, linearCrossEntropyLosses } from '../ops/crossentropy/op.js';
import { embedding } from '../ops/embedding/op.js';
import { Fp8Tensor, usesFp8 } from '../ops/linear/fp8.js';
import { feedForwardPays, fp8FeedForward } from '../ops/linear/fp8-mlp.js';
import { linear } from '../ops/linear/op.js';
import { fp8Rmsnorm, rmsnorm } from '../ops/rmsnorm/op.js';
import { dispose } from '../tensor/dispose.js';
import type { Parameter } from '../tensor/parameter.js';
import { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import { type Adapter, type AdapterSettings, addAdapters, isAdapted, project } from './adapters.js';
import { Attention, type AttentionContext, sequencesOf } from './attention.js';
import { ParameterStore, type StoredParameters } from './parameters.js';
import { type ComputeDtype, defaultDtype, headShapeOf, hiddenSize, type ModelShape, sparseShapeOf } from './shape.js';

/** Sizes of a feed-forward layer. */
export interface FeedForwardShape {
  readonly dim: number;
  readonly hidden: number;
  /** `silu`: down(silu(up x)). `swiglu`: up has twice the rows, a then b, and the layer is down(silu(a) * b). */
  readonly activation: 'silu' | 'swiglu';
  /** Whether both matrices have a bias. */
  readonly bias?: boolean;
}

/** A feed-forward layer: two matrices around an activation. */
export class FeedForward {
  /** [hidden, dim], or [2 * hidden, dim] with swiglu. */
  readonly up: Parameter;
  /** [dim, hidden] */
  readonly down: Parameter;
  /** Biases of the two matrices; null without. */
  readonly biases: { readonly up: Parameter; readonly down: Parameter } | null;
  readonly #activation: FeedForwardShape['activation'];

  /** `name` prefixes the parameters. */
  constructor(store: ParameterStore, name: string, { dim, hidden, activation, bias = false }: FeedForwardShape) {
    const rows = activation === 'swiglu' ? 2 * hidden : hidden;
    this.#activation = activation;
    this.up = store.matrix(`${name}.up`, [rows, dim], activation === 'swiglu' ? [hidden, hidden] : [hidden]);
    this.down = store.residualMatrix(`${name}.down`, [dim, hidden]);
    this.biases = bias
      ? { up: store.zeros(`${name}.up_bias`, [rows]), down: store.zeros(`${name}.down_bias`, [dim]) }
      : null;
  }

  /** Whether the input of a forward pass is to be in FP8, for `x` [T, dim] before its norm. */
  takesFp8(tape: Tape, x: Tensor): boolean {
    const [hidden, dim] = this.up.value.shape;
    const isPlain = this.#activation === 'silu' && !this.biases && !isAdapted(this.up) && !isAdapted(this.down);
    return isPlain && usesFp8(tape, x) && feedForwardPays(x.shape[0], hidden, dim);
  }

  /**
   * `x` [T, dim], normalised, in FP8 if `takesFp8` → [T, dim], added to `residual` [T, dim] if given. Drops `x`. With
   * `computesResult` false the result is only allocated: the second run of a checkpointed block does not need its values.
   */
  forward(tape: Tape, x: Tensor, residual: Tensor | null = null, computesResult = true): Tensor {
    if (x instanceof Fp8Tensor) {
      const weights = { up: operand(this.up, x), down: operand(this.down, x) };
      return fp8FeedForward(tape, x, weights, residual, computesResult);
    }
    const up = project(tape, x, this.up, this.biases?.up.value);
    tape.drop(x);
    const active = this.#activation === 'swiglu' ? swiglu(tape, up) : silu(tape, up);
    tape.drop(up);
    const out = project(tape, active, this.down, this.biases?.down.value, residual, computesResult);
    tape.drop(active);
    return out;
  }
}

/** A transformer block: attention and feed-forward, with RMSNorm before each and a residual around it. */
export class Block {
  readonly attentionNorm: Parameter;
  readonly attention: Attention;
  readonly feedForwardNorm: Parameter;
  readonly feedForward: FeedForward;
  readonly #epsilon: number;

  /** `name` prefixes the parameters; `layer` is the index in the cache and in calls of the observer. */
  constructor(store: ParameterStore, name: string, shape: ModelShape, layer = 0) {
    this.#epsilon = shape.normEps;
    this.attentionNorm = store.constant(`${name}.attention_norm`, [shape.dim], 1);
    this.attention = new Attention(store, `${name}.attention`, shape, layer);
    this.feedForwardNorm = store.constant(`${name}.mlp_norm`, [shape.dim], 1);
    const sizes = { dim: shape.dim, hidden: hiddenSize(shape), activation: shape.mlp, bias: shape.mlpBias };
    this.feedForward = new FeedForward(store, `${name}.mlp`, sizes);
  }

  /** `x` [T, dim] → [T, dim]. `computesResult`: see `FeedForward.forward`. */
  forward(tape: Tape, x: Tensor, context: AttentionContext, computesResult = true): Tensor {
    const attentionInput = this.#normed(tape, x, this.attentionNorm, this.attention);
    const middle = this.attention.forward(tape, attentionInput, context, x);
    tape.drop(attentionInput);
    const input = this.#normed(tape, middle, this.feedForwardNorm, this.feedForward);
    const out = this.feedForward.forward(tape, input, middle, computesResult);
    tape.drop(middle);
    return out;
  }

  #normed(tape: Tape, x: Tensor, { value }: Parameter, layer: Attention | FeedForward): Tensor {
    return layer.takesFp8(tape, x) ? fp8Rmsnorm(tape, x, value, this.#epsilon) : rmsnorm(tape, x, value, this.#epsilon);
  }
}

/** Options of a forward pass of a language model. */
export interface ForwardOptions extends AttentionContext {
  /** Keep only the input of every block and run the block again in the backward pass. */
  readonly checkpointing?: boolean;
}

/** A decoder-only language model. */
export class LanguageModel implements Disposable {
  readonly device: Device;
  /** The dtype of activations. */
  readonly dtype: ComputeDtype;
  /** Token embedding [vocabSize, dim]. */
  readonly embedding: Parameter;
  readonly blocks: readonly Block[];
  /** Weight [dim] of the last norm. */
  readonly norm: Parameter;
  /** Output matrix [vocabSize, dim]; the embedding when tied. */
  readonly head: Parameter;
  /** All parameters, in the order of the model's files. */
  readonly parameters: readonly Parameter[];
  /** Low-rank additions to its linear layers (`adapt`), whose parameters are the last ones of `parameters`. */
  readonly adapters: Adapter[] = [];
  readonly #store: ParameterStore;
  #shape: ModelShape;

  /** `initial`: the seed that parameters are drawn from, the same numbers on every device; or their stored values. */
  constructor(
    device: Device,
    shape: ModelShape,
    initial: number | StoredParameters,
    dtype: ComputeDtype = defaultDtype(device),
  ) {
    if (dtype === 'bf16' && device.kind === 'cpu')
      throw new UsageError('the CPU computes in f32: bf16 needs a CUDA device');
    this.dtype = dtype;
    this.device = device;
    this.#shape = shape;
    const store = new ParameterStore(device, initial, shape.nLayers, dtype);
    this.#store = store;
    try {
      this.embedding = store.matrix('embedding', [shape.vocabSize, shape.dim]);
      this.blocks = Array.from(
        { length: shape.nLayers },
        (_, layer) => new Block(store, `blocks.${layer}`, shape, layer),
      );
      this.norm = store.constant('norm', [shape.dim], 1);
      this.head = shape.tieEmbeddings ? this.embedding : store.matrix('head', [shape.vocabSize, shape.dim]);
    } catch (error) {
      store.free(); // a value could not be read
      throw error;
    }
    this.parameters = store.parameters;
  }

  /** Sizes of the model. */
  get shape(): ModelShape {
    return this.#shape;
  }

  /** Changes `shape.nsa.nSel`, on which no parameter depends. Caches and graphs made before are of the old shape. */
  setSelectedBlocks(nSel: number): void {
    if (nSel === this.#shape.nsa.nSel) return;
    const shape = { ...this.#shape, nsa: { ...this.#shape.nsa, nSel } };
    validateShapes(headShapeOf(shape), sparseShapeOf(shape));
    this.#shape = shape;
    for (const { attention } of this.blocks) attention.setShape(shape);
  }

  /**
   * Adds a low-rank adapter to linear layers and freezes all parameters besides. The outputs stay as they are until the
   * adapters are trained: one of their two matrices is zero.
   */
  adapt(settings: AdapterSettings): void {
    for (const parameter of this.parameters) parameter.freeze();
    this.adapters.push(...addAdapters(this.#store, this.shape, settings));
  }

  /** Number of values. */
  get parameterCount(): number {
    return this.parameters.reduce((total, { value }) => total + value.size, 0);
  }

  /** The normalised last hidden state [T, dim] of the tokens `ids` i32 [T]. */
  hidden(tape: Tape, ids: Tensor, options: ForwardOptions): Tensor {
    const lengths = sequencesOf(tape, options, ids.size, this.shape);
    const given = { ...options, lengths };
    let x = embedding(tape, this.embedding.value, ids, this.dtype);
    this.blocks.forEach((block) => {
      const input = x;
      if (options.checkpointing) {
        let context: AttentionContext = given;
        x = tape.checkpoint([input], (inner) => {
          const result = block.forward(inner, input, context, inner.computesResult);
          context = { ...given, observer: undefined }; // the second run, in the backward pass, shows nothing new
          return result;
        });
      } else {
        x = block.forward(tape, input, given);
      }
      tape.drop(input);
    });
    const normed = rmsnorm(tape, x, this.norm.value, this.shape.normEps);
    tape.drop(x);
    return normed;
  }

  /** Mean cross entropy [1] of predicting `targets` i32 [T]; -100 is ignored. */
  loss(tape: Tape, ids: Tensor, targets: Tensor, options: ForwardOptions): Tensor {
    const x = this.hidden(tape, ids, options);
    const loss = linearCrossEntropy(tape, x, operand(this.head, x), targets);
    tape.drop(x);
    return loss;
  }

  /** The loss of every token [T], without gradients; the caller frees it. */
  losses(ids: Tensor, targets: Tensor, options: ForwardOptions): Tensor {
    const tape = new Tape(this.device, { record: false });
    const x = this.hidden(tape, ids, options);
    const losses = linearCrossEntropyLosses(this.device, x, operand(this.head, x), targets);
    tape.end();
    return losses;
  }

  /** Logits [rows.length, vocabSize] of the tokens at these indices, for inference: on a tape that does not record. */
  logits(tape: Tape, ids: Tensor, rows: readonly number[], options: ForwardOptions): Tensor {
    const x = this.hidden(tape, ids, options);
    if (tape.tracks(x))
      throw new UsageError(
        'logits: rows have no gradient; use a tape with { record: false }, or to train ' +
          'linear(tape, hidden, operand(model.head, hidden)) with hidden = model.hidden(…)',
      );
    const chosen = tape.empty([rows.length, this.shape.dim], x.dtype);
    for (const [i, row] of rows.entries()) chosen.rows(i, i + 1).copyFrom(x.rows(row, row + 1));
    tape.drop(x);
    const logits = linear(tape, chosen, operand(this.head, chosen));
    tape.drop(chosen);
    return logits;
  }

  /** Frees all parameters and their gradients. */
  free(): void {
    this.#store.free();
  }

  /** `free`, for `using`. */
  [dispose](): void {
    this.#store[dispose]();
  }
}
