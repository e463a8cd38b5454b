/** A transformer block and its feed-forward layer. */
import { silu, swiglu } from '../ops/activation/op.js';
import { operand } from '../ops/cast/op.js';
import { usesFp8 } from '../ops/linear/fp8.js';
import { feedForwardPays, fp8FeedForward } from '../ops/linear/fp8-mlp.js';
import { linear } from '../ops/linear/op.js';
import { rmsnorm } from '../ops/rmsnorm/op.js';
import type { Parameter } from '../tensor/parameter.js';
import type { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import { Attention, type AttentionContext } from './attention.js';
import type { ParameterStore } from './parameters.js';
import { hiddenSize, type ModelShape } from './shape.js';

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

  /**
   * `x` [T, dim], normalised → [T, dim], added to `residual` [T, dim] if given. Drops `x`. With `computesResult` false the
   * result is only allocated: the second run of a checkpointed block does not need its values.
   */
  forward(tape: Tape, x: Tensor, residual: Tensor | null = null, computesResult = true): Tensor {
    const [hidden, dim] = this.up.value.shape;
    const isPlain = this.#activation === 'silu' && !this.biases;
    if (isPlain && usesFp8(tape, x) && feedForwardPays(x.shape[0], hidden, dim)) {
      const weights = { up: operand(this.up, x), down: operand(this.down, x) };
      const out = fp8FeedForward(tape, x, weights, residual, computesResult);
      tape.drop(x);
      return out;
    }
    const up = linear(tape, x, operand(this.up, x), this.biases?.up.value);
    tape.drop(x);
    const active = this.#activation === 'swiglu' ? swiglu(tape, up) : silu(tape, up);
    tape.drop(up);
    const out = linear(tape, active, operand(this.down, active), this.biases?.down.value, residual, computesResult);
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
    const attentionInput = rmsnorm(tape, x, this.attentionNorm.value, this.#epsilon);
    const middle = this.attention.forward(tape, attentionInput, context, x);
    tape.drop(attentionInput);
    const input = rmsnorm(tape, middle, this.feedForwardNorm.value, this.#epsilon);
    const out = this.feedForward.forward(tape, input, middle, computesResult);
    tape.drop(middle);
    return out;
  }
}
