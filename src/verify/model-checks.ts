/** Invariants 2, 7 and 8 for a whole model: causality, random tokens cannot be learned, bitwise repeatability. */
import type { Device } from '../device/device.js';
import { LanguageModel } from '../model/language-model.js';
import type { ModelShape } from '../model/shape.js';
import { AdamW } from '../ops/adamw/op.js';
import type { SelectionKernel } from '../ops/attention/selected/op.js';
import { Sequences } from '../ops/common/sequences.js';
import { clipFactor, gradientNorm } from '../ops/gradnorm/op.js';
import { fillIntegers } from '../tensor/random/op.js';
import { Tape, withTape } from '../tensor/tape.js';
import { Tensor } from '../tensor/tensor.js';
import { plural } from '../text.js';
import { type CaseShapes, outputSize, randomInputs } from './cases.js';
import { check, type Finding, type VerifyCheck, Worst } from './check.js';
import { runCore } from './core.js';
import { tinyShape } from './module.js';
import { differentBits, randomValues } from './numbers.js';

const VOCABULARY = 64;
const PHI = ['avg', 'conv', 'mlp'] as const;
const LENGTH = 77;

export function modelChecks(device: Device, full: boolean): VerifyCheck[] {
  const steps = full ? 800 : 120;
  return [
    check('2 causality', 'language model, other token ids after t', 0, () => modelCausality(device)),
    check('7 random tokens', `${steps} steps on uniform tokens: ln V - lowest loss`, 0.02, () =>
      randomTokens(device, steps),
    ),
    ...PHI.map((phi) =>
      check(
        '8 repeat',
        `5 training steps, phi ${phi}: again${hasThreads(device) ? ', with 1, 2 and 3 threads' : ''}`,
        0,
        () => repeatable(device, () => trainedBits(device, phi)),
      ),
    ),
    ...(['v1', 'v2'] as const).map((kernel) =>
      check(
        '8 repeat',
        `core forward and backward, kernel ${kernel}: again${hasThreads(device) ? ', with 1, 2 and 3 threads' : ''}`,
        0,
        () => repeatable(device, () => coreBits(device, kernel)),
      ),
    ),
  ];
}

function modelCausality(device: Device): Finding {
  const shape = tinyShape({}, {}, VOCABULARY);
  const model = new LanguageModel(device, shape, 41, 'f32');
  try {
    const ids = randomValues(LENGTH, 42).map((value) => Math.floor(((value + 1) / 2) * VOCABULARY));
    const hidden = (tokens: Float64Array) =>
      withTape(device, (tape) => {
        const input = tape.from(tokens, [LENGTH], 'i32');
        return model.hidden(tape, input, { lengths: [LENGTH] }).read() as Float32Array;
      });
    const before = hidden(ids);
    const worst = new Worst();
    for (let t = 0; t < LENGTH - 1; t++) {
      const changed = ids.map((id, i) => (i <= t ? id : (id + 1 + i) % VOCABULARY));
      const end = (t + 1) * shape.dim;
      const count = differentBits(hidden(changed).subarray(0, end), before.subarray(0, end));
      worst.add(count, `${count} hidden values up to token ${t} change with the tokens after it`);
    }
    return worst.finding;
  } finally {
    model.free();
  }
}

/** A window of a few tokens and small blocks: a leak in any branch would be learned within these steps. */
function randomTokens(device: Device, steps: number): Finding {
  const shape = tinyShape({ l: 4, d: 2, lSel: 4, nSel: 3, w: 4 }, { dim: 48, nLayers: 1, dK: 12, dV: 12 }, VOCABULARY);
  const lengths = Array.from({ length: 16 }, () => 64);
  const trainer = new RandomTrainer(device, { shape, lengths, learningRate: 3e-3, seed: 43 });
  try {
    let lowest = Number.POSITIVE_INFINITY;
    let at = 0;
    for (let step = 1; step <= steps; step++) {
      const loss = trainer.step();
      if (!(loss >= lowest)) [lowest, at] = [loss, step]; // also for NaN
    }
    const error = Math.log(VOCABULARY) - lowest;
    return { error, detail: `the loss was ${lowest.toFixed(4)} at step ${at}, below ln ${VOCABULARY} = 4.1589` };
  } finally {
    trainer.free();
  }
}

/** Losses and weights after a few training steps. */
function trainedBits(device: Device, phi: (typeof PHI)[number]): Float32Array[] {
  const options = { shape: tinyShape({ phi }, {}, VOCABULARY), lengths: [200, 33, 1], learningRate: 1e-3, seed: 44 };
  const trainer = new RandomTrainer(device, options);
  try {
    const losses = Float32Array.from({ length: 5 }, () => trainer.step());
    return [losses, ...trainer.model.parameters.map(({ value }) => value.read() as Float32Array)];
  } finally {
    trainer.free();
  }
}

const CORE: CaseShapes = {
  lengths: [600, 77],
  heads: { heads: 6, groups: 2, dk: 32, dv: 32 },
  sparse: { l: 16, d: 8, lSel: 32, nSel: 6, w: 96 },
};

function coreBits(device: Device, kernel: SelectionKernel): (Float32Array | Int32Array)[] {
  const dOut = randomValues(outputSize(CORE), 45);
  const { outputs, selected, gradients } = runCore(device, randomInputs(CORE, 46), CORE, dOut, { kernel });
  return [selected, ...Object.values(outputs), ...Object.values(gradients!)];
}

type Bits = (Float32Array | Int32Array)[];

function repeatable(device: Device, run: () => Bits): Finding {
  const worst = new Worst();
  const first = run();
  const compare = (bits: Bits, when: string) => {
    const count = bits.reduce((total, values, i) => total + differentBits(values, first[i]), 0);
    worst.add(count, `${count} values differ ${when}`);
  };
  compare(run(), 'when it is run again');
  if (!hasThreads(device)) return worst.finding;
  const { threads } = device;
  try {
    for (const count of [1, 2, 3]) {
      device.threads = count;
      compare(run(), `with ${plural(count, 'thread')}`);
    }
  } finally {
    device.threads = threads;
  }
  return worst.finding;
}

function hasThreads(device: Device): device is Device & { threads: number } {
  return 'threads' in device;
}

interface RandomTraining {
  readonly shape: ModelShape;
  readonly lengths: readonly number[];
  readonly learningRate: number;
  readonly seed: number;
}

/** Trains on fresh uniform tokens in every step; each token is predicted from those before it. */
class RandomTrainer {
  readonly model: LanguageModel;
  readonly #device: Device;
  readonly #options: RandomTraining;
  readonly #sequences: Sequences;
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
    this.#sequences = new Sequences(device, options.lengths);
    this.#ids = Tensor.empty(device, [this.#sequences.total], 'i32');
    this.#targets = Tensor.empty(device, [this.#sequences.total], 'i32');
  }

  /** One step; returns its loss before the update. */
  step(): number {
    this.#draw();
    const tape = new Tape(this.#device);
    const loss = this.model.loss(tape, this.#ids, this.#targets, { lengths: this.#sequences });
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
    this.#sequences.free();
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
