import { byDtype, strided } from '../../device/cuda/elements.js';
import { type CudaRuntime, f64 } from '../../device/cuda/runtime.js';
import type { Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const code = byDtype(cuda, new URL('./cuda.cu', import.meta.url), []);
  /** A thread for each block of words, and one more for an offset inside the first. */
  const shape = (count: number, perBlock: number) => strided(cuda, count === 0 ? 0 : Math.ceil(count / perBlock) + 1);
  return {
    random_uniform: (out, count, ...source) => code().launch('random_uniform', shape(count, 4), out, count, ...source),
    random_normal: (out, count, seed, stream, offset, deviation) =>
      code().launch('random_normal', shape(count, 2), out, count, seed, stream, offset, f64(deviation)),
    random_integers: (out, count, ...source) =>
      code().launch('random_integers', shape(count, 2), out, count, ...source),
  };
}
