/** A minimal trainer on random tokens, for checks of whole steps. */
import type { Device } from '../device/device.js';
import { LanguageModel } from '../model/language-model.js';
import { type ModelShape, sparseShapeOf } from '../model/shape.js';
import { AdamW } from '../ops/adamw/op.js';
import { type SparseLayout, sparseLayout } from '../ops/attention/nsa.js';
import { Sequences } from '../ops/common/sequences.js';
import { clipFactor, gradientNorm } from '../ops/gradnorm/op.js';
import { fillIntegers } from '../tensor/random/op.js';
import { Tape } from '../tensor/tape.js';
import { Tensor } from '../tensor/tensor.js';

export interface RandomTraining {
  readonly shape: ModelShape;
  readonly lengths: readonly number[];
  readonly learningRate: number;
  readonly seed: number;
}

/** Trains on fresh uniform tokens in every step; each token is predicted from those before it. */
export class RandomTrainer {
  readonly model: LanguageModel;
  readonly #device: Device;
  readonly #options: RandomTraining;
  readonly #layout: SparseLayout;
  readonly #optimizer: AdamW;
  readonly #ids: Tensor;
  readonly #targets: Tensor;
  #step = 0;

  constructor(device: Device, options: RandomTraining) {
    this.#device = device;
    this.#options = options;
    this.model = new LanguageModel(device, options.shape, options.seed, 'f32');
    this.#optimizer = new AdamW(
      device,
      this.model.parameters.map((parameter) => ({ parameter, weightDecay: 0 })),
    );
    this.#layout = sparseLayout(new Sequences(device, options.lengths), sparseShapeOf(options.shape));
    this.#ids = Tensor.empty(device, [this.#layout.tokens.total], 'i32');
    this.#targets = Tensor.empty(device, [this.#layout.tokens.total], 'i32');
  }

  /** One step; returns its loss before the update. */
  step(): number {
    this.#draw();
    const tape = new Tape(this.#device);
    const loss = this.model.loss(tape, this.#ids, this.#targets, { layout: this.#layout });
    const value = loss.item();
    tape.backward(loss);
    tape.end();
    const gradients = this.model.parameters.flatMap(({ gradient }) => (gradient ? [gradient] : []));
    const gradientScale = clipFactor(gradientNorm(this.#device, gradients).norm, 1);
    this.#optimizer.step({ learningRate: this.#options.learningRate, gradientScale });
    for (const parameter of this.model.parameters) parameter.clearGradient();
    return value;
  }

  free(): void {
    this.#optimizer.free();
    this.model.free();
    this.#ids.free();
    this.#targets.free();
    this.#layout.blocks.free();
    this.#layout.tokens.free();
  }

  /** Draws S + 1 tokens: the targets are the inputs shifted by one. */
  #draw(): void {
    const { shape, lengths, seed } = this.#options;
    const drawn = Tensor.empty(this.#device, [this.#ids.size + lengths.length], 'i32');
    fillIntegers(drawn, { seed, stream: 1_000_000 + this.#step }, shape.vocabSize);
    let from = 0;
    let to = 0;
    for (const length of lengths) {
      this.#ids.rows(to, to + length).copyFrom(drawn.rows(from, from + length));
      this.#targets.rows(to, to + length).copyFrom(drawn.rows(from + 1, from + length + 1));
      from += length + 1;
      to += length;
    }
    drawn.free();
    this.#step += 1;
  }
}
