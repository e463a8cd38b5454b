/**
 * Muon: the momentum of a weight matrix is orthogonalised before it becomes the update, so every direction of the matrix
 * moves equally far. AdamW updates the parameters that are no such matrices (`Parameter.matrices`).
 *
 * Orthogonalisation is five Newton-Schulz iterations, products alone. Matrices of one shape are multiplied as a batch.
 * Nothing waits for the device, so a graph can record a step.
 */
import { type Device, defineKernels } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import { dispose } from '../../tensor/dispose.js';
import {
  type DeviceStep,
  expectLearningRate,
  expectUniqueNames,
  type Optimizer,
  type OptimizerStep,
  STEP_SCALARS,
  type TrainedParameter,
} from '../../tensor/optimizer.js';
import { Tensor } from '../../tensor/tensor.js';
import { AdamW, type AdamWOptions } from '../adamw/op.js';
import { expectShape } from '../common/shapes.js';
import { PIECE, type TableRow, TensorTable } from '../common/tensor-table.js';
import { matrixProducts } from '../linear/op.js';
import { launchers } from './cuda.js';
import { ITERATIONS, QUINTIC, updateScale } from './reference.js';

const table = ['ptr', 'ptr'] as const; // records, pieces
const range = ['i64', 'i64', 'i64'] as const; // first matrix, first piece, pieces
export const signatures = {
  muon_momentum: [...table, 'ptr', 'ptr', 'ptr', 'i64', 'i64', 'f32'],
  muon_direction: [...table, 'ptr', 'ptr', 'ptr', ...range, 'f32'],
  muon_update: [...table, 'ptr', 'ptr', 'ptr', ...range],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** Options of `Muon`. `betas` and `epsilon` are those of AdamW, for the parameters that are no matrices. */
export interface MuonOptions extends AdamWOptions {
  /** Decay rate of the momentum. Default 0.95. */
  readonly momentum?: number;
  /** The learning rate of matrices is that of a step times this. Default 1. */
  readonly learningRateRatio?: number;
  /** Number type of the orthogonalisation. Default: bf16 on a GPU, f32 on the CPU. */
  readonly dtype?: 'f32' | 'bf16';
}

/** Where `nextStep` puts the learning rate of matrices (struct Scalars of the kernels). */
const MATRIX_RATE = 5;

/** Elements of a batch of matrices at most, unless one has more: bounds the memory of a step, on a CPU to its caches. */
const BATCH_ELEMENTS: Readonly<Record<Device['kind'], number>> = { cpu: 2 ** 20, cuda: 2 ** 25 };

/** Matrices of one shape in a batch. */
function batchSize(kind: Device['kind'], matrices: number, rows: number, columns: number): number {
  return Math.min(matrices, Math.max(1, Math.floor(BATCH_ELEMENTS[kind] / (rows * columns))));
}

/** Elements of the buffers with which a step updates `matrices` matrices of one shape. */
export function muonElements(kind: Device['kind'], matrices: number, rows: number, columns: number): number {
  const size = Math.min(rows, columns);
  return batchSize(kind, matrices, rows, columns) * 2 * (rows * columns + size * size);
}

interface Matrix extends TableRow {
  readonly rows: number;
  readonly columns: number;
}

/** The Muon optimizer for weight matrices, with AdamW for all other parameters. */
export class Muon implements Optimizer, Disposable {
  readonly name = 'muon';
  readonly #device: Device;
  readonly #trained: readonly TrainedParameter[];
  readonly #average = new Map<string, Tensor>();
  readonly #rest: AdamW;
  readonly #momentum: number;
  readonly #ratio: number;
  readonly #dtype: 'f32' | 'bf16';
  readonly #table: TensorTable;
  /** The numbers of `step`. */
  #numbers: Tensor | null = null;

  constructor(device: Device, trained: readonly TrainedParameter[], options: MuonOptions = {}) {
    const { momentum = 0.95, learningRateRatio = 1, dtype = device.kind === 'cuda' ? 'bf16' : 'f32' } = options;
    expectUniqueNames('Muon', trained);
    if (!(momentum >= 0 && momentum < 1))
      throw new UsageError(`Muon: momentum must be from 0 to below 1, not ${momentum}`);
    if (!(Number.isFinite(learningRateRatio) && learningRateRatio > 0))
      throw new UsageError(`Muon: learningRateRatio must be above 0, not ${learningRateRatio}`);
    if (dtype === 'bf16' && device.kind === 'cpu') throw new UsageError('Muon: the CPU computes in f32');
    this.#device = device;
    this.#momentum = momentum;
    this.#ratio = learningRateRatio;
    this.#dtype = dtype;
    this.#table = new TensorTable(device);
    this.#trained = trained.filter(isMatrix);
    this.#rest = new AdamW(
      device,
      trained.filter((one) => !isMatrix(one)),
      options,
    );
    for (const { parameter } of this.#trained)
      this.#average.set(parameter.name, Tensor.zeros(device, parameter.value.shape));
  }

  get steps(): number {
    return this.#rest.steps;
  }
  set steps(count: number) {
    this.#rest.steps = count;
  }

  /** `<parameter>.momentum` of the matrices, then `<parameter>.m` and `<parameter>.v` of the others. */
  get state(): ReadonlyMap<string, Tensor> {
    const averages = [...this.#average].map(([name, tensor]) => [`${name}.momentum`, tensor] as const);
    return new Map([...averages, ...this.#rest.state]);
  }

  /** Updates every parameter that has a gradient, and clears the gradients unless `keepGradients` is set. */
  step({ learningRate, gradientScale = 1, keepGradients = false }: OptimizerStep): void {
    expectLearningRate('Muon', learningRate);
    this.#rest.step({ learningRate, gradientScale, keepGradients });
    const numbers = new Float32Array(STEP_SCALARS);
    numbers[0] = gradientScale;
    numbers[MATRIX_RATE] = learningRate * this.#ratio;
    this.#numbers ??= Tensor.empty(this.#device, [STEP_SCALARS]);
    this.#numbers.write(numbers);
    this.#launch(this.#numbers, this.#numbers.rows(0, 1));
    if (!keepGradients) for (const { parameter } of this.#trained) parameter.clearGradient?.();
  }

  /** Counts a step and returns its numbers for `stepOnDevice` (see `Optimizer`). */
  nextStep(numbers: DeviceStep): Float32Array {
    expectLearningRate('Muon', numbers.learningRate);
    const scalars = this.#rest.nextStep(numbers);
    scalars[MATRIX_RATE] = numbers.learningRate * this.#ratio;
    return scalars;
  }

  /** Launches the update of every parameter that has a gradient, with numbers on the device (see `Optimizer`). */
  stepOnDevice(scalars: Tensor, sums: Tensor | null = null): void {
    expectShape('Muon: scalars', scalars, [STEP_SCALARS]);
    this.#launch(scalars, this.#rest.stepOnDevice(scalars, sums));
  }

  /** `factor` f32 [1] is the factor on gradients; NaN changes nothing. */
  #launch(scalars: Tensor, factor: Tensor): void {
    const device = this.#device;
    const kernel = device.kernels(kernels);
    const matrices = this.#matrices();
    this.#table.update(matrices);
    const { records, pieces, pieceCount } = this.#table;
    const partials = Tensor.empty(device, [pieceCount], 'f64');
    const norms = Tensor.empty(device, [matrices.length]);
    const inputs = [records, pieces, factor] as const;
    kernel.muon_momentum(...inputs, partials, norms, matrices.length, pieceCount, this.#momentum);
    partials.free();
    let firstPiece = 0;
    for (let first = 0; first < matrices.length; ) {
      const { rows, columns, size } = matrices[first];
      const alike = matrices.findIndex((one, i) => i > first && (one.rows !== rows || one.columns !== columns));
      const count = batchSize(device.kind, (alike < 0 ? matrices.length : alike) - first, rows, columns);
      const range = [first, firstPiece, count * Math.ceil(size / PIECE)] as const;
      const direction = Tensor.empty(device, [count, rows, columns], this.#dtype);
      kernel.muon_direction(...inputs, norms, direction, ...range, this.#momentum);
      const update = orthogonalize(device, direction);
      kernel.muon_update(records, pieces, scalars, factor, update, ...range);
      update.free();
      first += count;
      firstPiece += range[2];
    }
    norms.free();
  }

  /** The matrices that have a gradient; those of one shape are neighbours. */
  #matrices(): Matrix[] {
    const all = this.#trained.flatMap(({ parameter, weightDecay }): Matrix[] => {
      const { name, value, gradient, rounded, matrices = [] } = parameter;
      const average = this.#average.get(name);
      if (!gradient || !average) return [];
      const [, columns] = value.shape;
      let from = 0;
      return matrices.map((rows) => {
        const to = from + rows;
        const addresses = [value, gradient, average].map((tensor) => tensor.rows(from, to).pointer);
        const copy = rounded?.rows(from, to).pointer ?? 0n;
        from = to;
        const words = [...addresses, copy, weightDecay, updateScale(rows, columns)];
        return { rows, columns, size: rows * columns, words };
      });
    });
    return all.sort((a, b) => a.rows - b.rows || a.columns - b.columns);
  }

  /** `free`, for `using`. */
  [dispose](): void {
    this.free();
  }

  /** Frees momentum and moments. */
  free(): void {
    for (const tensor of this.#average.values()) tensor.free();
    this.#average.clear();
    this.#rest.free();
    this.#table.free();
    this.#numbers?.free();
    this.#numbers = null;
  }
}

function isMatrix({ parameter }: TrainedParameter): boolean {
  return (parameter.matrices ?? []).length > 0;
}

/**
 * Newton-Schulz iterations on `x` [count, rows, columns], matrices of Frobenius norm 1 at most. Frees `x` and returns the
 * result. The Gram matrix is that of the shorter side.
 */
export function orthogonalize(device: Device, x: Tensor): Tensor {
  const [count, rows, columns] = x.shape;
  const isTall = rows > columns;
  const size = Math.min(rows, columns);
  const [a, b, c] = QUINTIC;
  const gram = Tensor.empty(device, [count, size, size], x.dtype);
  const polynomial = Tensor.empty(device, [count, size, size], x.dtype);
  let [from, into] = [x, Tensor.empty(device, x.shape, x.dtype)];
  for (let i = 0; i < ITERATIONS; i++) {
    matrixProducts(device, { a: from, b: from, d: gram, transposeA: isTall, transposeB: !isTall });
    matrixProducts(device, { a: gram, b: gram, c: gram, d: polynomial, alpha: c, beta: b });
    const [left, right] = isTall ? [from, polynomial] : [polynomial, from];
    matrixProducts(device, { a: left, b: right, c: from, d: into, beta: a });
    [from, into] = [into, from];
  }
  for (const tensor of [gram, polynomial, into]) tensor.free();
  return from;
}
