import { byDtype, strided } from '../../device/cuda/elements.js';
import type { CudaRuntime } from '../../device/cuda/runtime.js';
import type { Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

const NUMBERS_PER_THREAD = 8;

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const code = byDtype(cuda, new URL('./cuda.cu', import.meta.url), []);
  const shape = (count: number) => strided(cuda, Math.ceil(count / NUMBERS_PER_THREAD));
  return {
    cast_f32_to_bf16: (from, into, count) => code().launch('cast_f32_to_bf16', shape(count), from, into, count),
    cast_bf16_to_f32: (from, into, count) => code().launch('cast_bf16_to_f32', shape(count), from, into, count),
  };
}
