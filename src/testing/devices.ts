/** The devices a test runs on. Every operation's test runs on each; a device that is absent is named, never passed over. */
import { CpuDevice } from '../device/cpu/cpu.js';
import { findBackend } from '../device/cuda/compile.js';
import { CudaDevice, cudaAbsence } from '../device/cuda/cuda.js';
import { LibraryMissing } from '../device/cuda/libraries.js';
import type { Device } from '../device/device.js';
import { bfloat16ToFloat32, float32ToBfloat16 } from '../tensor/bfloat16.js';

let sharedCpu: CpuDevice | null = null;
let sharedCuda: CudaDevice | null = null;

/** One CPU device per test process: kernels are loaded once. */
export function cpu(): CpuDevice {
  sharedCpu ??= new CpuDevice();
  return sharedCpu;
}

export function cuda(): CudaDevice {
  sharedCuda ??= new CudaDevice();
  return sharedCuda;
}

/** Why CUDA sources cannot be compiled here; null when they can. No GPU is needed for it. */
export function cudaCompilerAbsence(): string | null {
  try {
    findBackend();
    return null;
  } catch (error) {
    if (!(error instanceof LibraryMissing)) throw error;
    return `no CUDA compiler: ${error.message}`;
  }
}

export type Precision = 'f32' | 'bf16';

export interface TestDevice {
  readonly name: string;
  readonly device: () => Device;
  /** What activations are held in. */
  readonly dtype: Precision;
}

/** For `describe.each(devices())`: a name, how to get the device, and the dtype to compute in. */
export function devices(): TestDevice[] {
  const list: TestDevice[] = [{ name: 'cpu', device: cpu, dtype: 'f32' }];
  if (cudaAbsence() === null)
    list.push({ name: 'cuda', device: cuda, dtype: 'f32' }, { name: 'cuda in bf16', device: cuda, dtype: 'bf16' });
  return list;
}

/** The values a tensor of this dtype really holds, so that a kernel and its reference start from the same numbers. */
export function rounded(values: Float64Array, dtype: Precision): Float64Array {
  return dtype === 'f32' ? values : Float64Array.from(bfloat16ToFloat32(float32ToBfloat16(values)));
}

/** How far a backend may be from the float64 reference, as ‖a-b‖/‖b‖. */
export function tolerance(dtype: Precision): number {
  return dtype === 'f32' ? 2e-5 : 1e-2;
}
