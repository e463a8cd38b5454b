/** The global L2 norm of a list of gradients, summed in float64 in a fixed order, and how many numbers are not finite. */
import { type Device, defineKernels } from '../../device/device.js';
import { Tensor } from '../../tensor/tensor.js';
import { expectShape } from '../shapes.js';

const kernels = defineKernels(import.meta.url, {
  gradnorm_sum: ['ptr', 'ptr', 'ptr', 'i64'],
});

/** Must be the kernel's: numbers that one partial sum covers. */
const NUMBERS_PER_PARTIAL = 2 ** 14;
/** What the kernel writes: a sum of squares and a count. */
const FIELDS = 2;

export interface GradientNorm {
  /** The root of the sum of all squares; NaN or infinite when `nonFinite` is not 0. */
  readonly norm: number;
  /** The norm of each gradient, in the order given. */
  readonly each: readonly number[];
  /** How many numbers are NaN or infinite. */
  readonly nonFinite: number;
}

export function gradientNorm(device: Device, gradients: readonly Tensor[]): GradientNorm {
  gradients.forEach((gradient, i) => void expectShape(`gradientNorm: gradient ${i}`, gradient, gradient.shape));
  const kernel = device.kernels(kernels);
  const longest = gradients.reduce((most, { size }) => Math.max(most, size), 0);
  const partials = Tensor.empty(device, [Math.ceil(longest / NUMBERS_PER_PARTIAL), FIELDS], 'f64');
  const sums = Tensor.empty(device, [gradients.length, FIELDS], 'f64');
  gradients.forEach((gradient, i) => {
    kernel.gradnorm_sum(gradient, partials, sums.rows(i, i + 1), gradient.size);
  });
  const values = sums.read(); // once for all of them: the host waits for the device here
  partials.free();
  sums.free();
  let [squares, nonFinite] = [0, 0];
  const each = gradients.map((_, i) => {
    squares += values[i * FIELDS];
    nonFinite += values[i * FIELDS + 1];
    return Math.sqrt(values[i * FIELDS]);
  });
  return { norm: Math.sqrt(squares), each, nonFinite };
}

/** What to multiply gradients by so that their norm is at most `maxNorm`; NaN for a norm that is not finite. */
export function clipFactor(norm: number, maxNorm: number): number {
  if (!Number.isFinite(norm)) return Number.NaN;
  return norm > maxNorm ? maxNorm / norm : 1;
}
