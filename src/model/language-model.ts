/**
 * A decoder-only language model: embedding, blocks of attention and feed-forward with RMSNorm before each and a
 * residual around it, a last norm, and the head (its own matrix, or the embedding's when tied).
 */
import type { Device } from '../device/device.js';
import { UsageError } from '../errors.js';
import { silu, swiglu } from '../ops/activation/op.js';
import { linearCrossEntropy, linearCrossEntropyLosses } from '../ops/crossentropy/op.js';
import { embedding } from '../ops/embedding/op.js';
import { linear } from '../ops/linear/op.js';
import { rmsnorm } from '../ops/rmsnorm/op.js';
import type { Parameter } from '../tensor/parameter.js';
import { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import { type AttentionContext, type AttentionModule, createAttention, expectContext } from './attention.js';
import { operand } from './operand.js';
import { ParameterStore } from './parameters.js';
import { hiddenSize, type ModelShape } from './shape.js';

export type ComputeDtype = 'f32' | 'bf16';

export interface ForwardOptions extends AttentionContext {
  /** Keep only the input of every block and run the block again in the backward pass. */
  readonly checkpointing?: boolean;
}

class Block {
  readonly #shape: ModelShape;
  readonly #attentionNorm: Parameter;
  readonly #attention: AttentionModule;
  readonly #feedForwardNorm: Parameter;
  readonly #up: Parameter;
  readonly #down: Parameter;

  constructor(store: ParameterStore, layer: number, shape: ModelShape) {
    const name = `blocks.${layer}`;
    const hidden = hiddenSize(shape);
    this.#shape = shape;
    this.#attentionNorm = store.constant(`${name}.attention_norm`, [shape.dim], 1);
    this.#attention = createAttention(store, `${name}.attention`, layer, shape);
    this.#feedForwardNorm = store.constant(`${name}.mlp_norm`, [shape.dim], 1);
    this.#up = store.matrix(`${name}.mlp.up`, [shape.mlp === 'swiglu' ? 2 * hidden : hidden, shape.dim]);
    this.#down = store.residualMatrix(`${name}.mlp.down`, [shape.dim, hidden]);
  }

  forward(tape: Tape, x: Tensor, context: AttentionContext): Tensor {
    const { normEps: epsilon, mlp } = this.#shape;
    const attentionInput = rmsnorm(tape, x, this.#attentionNorm.value, epsilon);
    const middle = this.#attention.forward(tape, attentionInput, context, x);
    tape.drop(attentionInput);
    const input = rmsnorm(tape, middle, this.#feedForwardNorm.value, epsilon);
    const up = linear(tape, input, operand(this.#up, input));
    tape.drop(input);
    const active = mlp === 'swiglu' ? swiglu(tape, up) : silu(tape, up);
    tape.drop(up);
    const out = linear(tape, active, operand(this.#down, active), null, middle, tape.isResultRead);
    tape.drop(active);
    tape.drop(middle);
    return out;
  }
}

export class LanguageModel {
  readonly device: Device;
  readonly shape: ModelShape;
  /** What activations are held in. */
  readonly dtype: ComputeDtype;
  readonly #store: ParameterStore;
  readonly #embedding: Parameter;
  readonly #blocks: Block[];
  readonly #norm: Parameter;
  readonly #head: Parameter;

  /** Parameters are drawn from `seed`: the same numbers on every device. */
  constructor(device: Device, shape: ModelShape, seed: number, dtype: ComputeDtype = 'f32') {
    if (dtype === 'bf16' && device.kind === 'cpu')
      throw new UsageError('the CPU computes in f32: bf16 needs a CUDA device');
    this.dtype = dtype;
    this.device = device;
    this.shape = shape;
    this.#store = new ParameterStore(device, seed, shape.nLayers, dtype);
    this.#embedding = this.#store.matrix('embedding', [shape.vocabSize, shape.dim]);
    this.#blocks = Array.from({ length: shape.nLayers }, (_, layer) => new Block(this.#store, layer, shape));
    this.#norm = this.#store.constant('norm', [shape.dim], 1);
    this.#head = shape.tieEmbeddings ? this.#embedding : this.#store.matrix('head', [shape.vocabSize, shape.dim]);
  }

  get parameters(): readonly Parameter[] {
    return this.#store.parameters;
  }

  get parameterCount(): number {
    return this.parameters.reduce((total, { value }) => total + value.size, 0);
  }

  /** The normalised last hidden state [T, dim] of the tokens `ids` i32 [T]. */
  hidden(tape: Tape, ids: Tensor, options: ForwardOptions): Tensor {
    expectContext(options, ids.size, this.shape);
    let x = embedding(tape, this.#embedding.value, ids, this.dtype);
    this.#blocks.forEach((block) => {
      const input = x;
      if (options.checkpointing) {
        let context: AttentionContext = options;
        x = tape.checkpoint([input], (inner) => {
          const result = block.forward(inner, input, context);
          context = { ...options, observer: undefined }; // the second run, in the backward pass, shows nothing new
          return result;
        });
      } else {
        x = block.forward(tape, input, options);
      }
      tape.drop(input);
    });
    const normed = rmsnorm(tape, x, this.#norm.value, this.shape.normEps);
    tape.drop(x);
    return normed;
  }

  /** Mean cross entropy [1] of predicting `targets` i32 [T]; -100 is ignored. */
  loss(tape: Tape, ids: Tensor, targets: Tensor, options: ForwardOptions): Tensor {
    const x = this.hidden(tape, ids, options);
    const loss = linearCrossEntropy(tape, x, operand(this.#head, x), targets);
    tape.drop(x);
    return loss;
  }

  /** The loss of every token [T], without gradients; the caller frees it. */
  losses(ids: Tensor, targets: Tensor, options: ForwardOptions): Tensor {
    const tape = new Tape(this.device, { record: false });
    const x = this.hidden(tape, ids, options);
    const losses = linearCrossEntropyLosses(this.device, x, operand(this.#head, x), targets);
    tape.end();
    return losses;
  }

  /** Logits [rows, vocab] of the tokens `rows` names by index. */
  logits(tape: Tape, ids: Tensor, rows: readonly number[], options: ForwardOptions): Tensor {
    const x = this.hidden(tape, ids, options);
    const chosen = tape.empty([rows.length, this.shape.dim], x.dtype);
    for (const [i, row] of rows.entries()) chosen.rows(i, i + 1).copyFrom(x.rows(row, row + 1));
    tape.drop(x);
    const logits = linear(tape, chosen, operand(this.#head, chosen));
    tape.drop(chosen);
    return logits;
  }

  free(): void {
    this.#store.free();
  }
}
