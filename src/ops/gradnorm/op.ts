/**
 * The global L2 norm of a list of gradients, summed in float64 in a fixed order, and how many numbers are not finite.
 * The sums stay on the device until they are read: an optimizer can clip by them without the host.
 */
import { type Device, defineKernels } from '../../device/device.js';
import { Tensor } from '../../tensor/tensor.js';
import { expectShape } from '../common/shapes.js';
import { TensorTable } from '../common/tensor-table.js';
import { launchers } from './cuda.js';

export const signatures = {
  gradnorm_sums: ['ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** Numbers that the kernel writes for a gradient: a sum of squares and a count. */
const FIELDS = 2;

/** Norm of all gradients and number of non-finite values. */
export interface GradientNorm {
  /** The root of the sum of all squares; NaN or infinite when `nonFinite` is not 0. */
  readonly norm: number;
  /** The norm of each gradient, in the order given. */
  readonly each: readonly number[];
  /** How many numbers are NaN or infinite. */
  readonly nonFinite: number;
}

/** Gradient norms for every step; the table of gradients is uploaded only when it changes. */
export class GradientNorms {
  readonly #device: Device;
  readonly #table: TensorTable;
  #sums: Tensor | null = null;

  constructor(device: Device) {
    this.#device = device;
    this.#table = new TensorTable(device);
  }

  /**
   * Launches the sums and does not wait: f64 [gradients + 1, 2], the sum of squares and the count of numbers that are
   * not finite, for each gradient and, in the last row, for all of them. Valid until the next call.
   */
  launch(gradients: readonly Tensor[]): Tensor {
    gradients.forEach((gradient, i) => void expectShape(`gradientNorm: gradient ${i}`, gradient, gradient.shape));
    const table = this.#table;
    table.update(gradients.map(({ size, pointer }) => ({ size, words: [pointer] })));
    if (this.#sums?.shape[0] !== gradients.length + 1) {
      this.#sums?.free();
      this.#sums = Tensor.empty(this.#device, [gradients.length + 1, FIELDS], 'f64');
    }
    const partials = Tensor.empty(this.#device, [table.pieceCount, FIELDS], 'f64');
    this.#device
      .kernels(kernels)
      .gradnorm_sums(table.records, table.pieces, partials, this.#sums, gradients.length, table.pieceCount);
    partials.free();
    return this.#sums;
  }

  /** Reads the result of the last launch; waits for the device. */
  read(): GradientNorm {
    if (!this.#sums) throw new Error('no gradients were summed yet');
    const sums = this.#sums.read();
    const count = sums.length / FIELDS - 1;
    const norm = (row: number) => Math.sqrt(sums[row * FIELDS]);
    return {
      norm: norm(count),
      each: Array.from({ length: count }, (_, row) => norm(row)),
      nonFinite: sums[count * FIELDS + 1],
    };
  }

  free(): void {
    this.#table.free();
    this.#sums?.free();
    this.#sums = null;
  }
}

/** The norm of some gradients, at once. */
export function gradientNorm(device: Device, gradients: readonly Tensor[]): GradientNorm {
  const norms = new GradientNorms(device);
  try {
    norms.launch(gradients);
    return norms.read();
  } finally {
    norms.free();
  }
}

/** The factor that limits the norm of gradients to `maxNorm`; NaN if the norm is not finite. */
export function clipFactor(norm: number, maxNorm: number): number {
  if (!Number.isFinite(norm)) return Number.NaN;
  return norm > maxNorm ? maxNorm / norm : 1;
}
