/**
 * Devices from within: memory, and kernels of one's own (`defineKernels`) in C++ for the CPU and CUDA C++ for a GPU.
 *
 * @packageDocumentation
 */

export type { CompilerOptions } from '../device/cpu/compile.js';
export { CpuDevice, type CpuOptions } from '../device/cpu/cpu.js';
export { cudaAbsence } from '../device/cuda/cuda.js';
export {
  type CudaCode,
  type CudaRuntime,
  type Floating,
  f32,
  f64,
  type KernelMacros,
  type LaunchArgument,
  type LaunchShape,
  type MatrixProduct,
} from '../device/cuda/runtime.js';
export {
  type Addressable,
  type ArgumentKind,
  type Arguments,
  defineKernels,
  type HostDevice,
  type KernelArgument,
  type KernelModule,
  type KernelOptions,
  type KernelSource,
  type Kernels,
  type MemoryUse,
  type Signature,
  type Signatures,
  type StructArgument,
} from '../device/device.js';
export type { Allocation, MemoryPool } from '../device/pool.js';
