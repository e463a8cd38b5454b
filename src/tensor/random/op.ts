/**
 * Random numbers by counter (Philox4x32-10, Salmon et al. 2011): value i is a function of (seed, stream, i) alone. The
 * numbers are bitwise the same on every device and for any number of threads, and a tensor may be filled in pieces.
 */
import { defineKernels } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import type { Dtype, Tensor } from '../tensor.js';
import { launchers } from './cuda.js';

export const signatures = {
  random_uniform: ['ptr', 'i64', 'i64', 'i64', 'i64'],
  random_normal: ['ptr', 'i64', 'i64', 'i64', 'i64', 'f64'],
  random_integers: ['ptr', 'i64', 'i64', 'i64', 'i64', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/**
 * Where numbers come from. Streams of one seed are independent: give each use its own. `offset` is the index of the
 * first value; all three are whole numbers from 0 below 2^53.
 */
export interface RandomSource {
  readonly seed: number;
  readonly stream: number;
  readonly offset?: number;
}

/** Float32 numbers in [0, 1), multiples of 2^-24. */
export function fillUniform(tensor: Tensor, source: RandomSource): void {
  const { seed, stream, offset } = checked('fillUniform', tensor, 'f32', source);
  tensor.device.kernels(kernels).random_uniform(tensor, tensor.size, seed, stream, offset);
}

/** Float32 numbers of a normal distribution around 0. */
export function fillNormal(tensor: Tensor, source: RandomSource, standardDeviation = 1): void {
  const { seed, stream, offset } = checked('fillNormal', tensor, 'f32', source);
  tensor.device.kernels(kernels).random_normal(tensor, tensor.size, seed, stream, offset, standardDeviation);
}

/** Whole numbers in [0, limit), all equally likely to within 2^-32. */
export function fillIntegers(tensor: Tensor, source: RandomSource, limit: number): void {
  const { seed, stream, offset } = checked('fillIntegers', tensor, 'i32', source);
  if (!Number.isInteger(limit) || limit < 1 || limit > 2 ** 31)
    throw new UsageError(`fillIntegers: limit must be a whole number from 1 to 2^31, not ${limit}`);
  tensor.device.kernels(kernels).random_integers(tensor, tensor.size, seed, stream, offset, limit);
}

function checked(what: string, tensor: Tensor, dtype: Dtype, source: RandomSource): Required<RandomSource> {
  if (tensor.dtype !== dtype) throw new UsageError(`${what}: tensor must be ${dtype}, not ${tensor.dtype}`);
  const { seed, stream, offset = 0 } = source;
  for (const [name, value] of Object.entries({ seed, stream, offset }))
    if (!Number.isSafeInteger(value) || value < 0)
      throw new UsageError(`${what}: ${name} must be a whole number from 0 below 2^53, not ${value}`);
  return { seed, stream, offset };
}
