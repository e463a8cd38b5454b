/** Opens a device of this machine by its kind. */
import { UsageError } from '../errors.js';
import { defaultCompilerOptions } from './cpu/compile.js';
import { CpuDevice } from './cpu/cpu.js';
import { CudaDevice, cudaAbsence } from './cuda/cuda.js';
import type { Device, DeviceKind, HostDevice } from './device.js';
import type { CompileProgress } from './kernel-cache.js';
import { chooseKernels } from './kernel-choice.js';
import { openWasmDevice } from './wasm/node.js';

/** Options of `openDevice`; each applies to the device it names and is ignored by the other. */
export interface OpenDeviceOptions {
  /** CPU: threads that run kernels. Default: all cores. Results do not depend on it. */
  readonly threads?: number;
  /** CUDA: index among the visible GPUs. Default 0. */
  readonly index?: number;
  /** CUDA: bitwise equal runs, at some cost in speed. Default false. */
  readonly deterministic?: boolean;
  /** Told about each kernel that is compiled, which the first run on a machine does. */
  readonly progress?: CompileProgress;
  /** CPU: told why kernels run in WebAssembly, if native ones cannot be had. */
  readonly warn?: (line: string) => void;
}

/**
 * Opens a device: `cpu`, `cuda`, or with `auto` the GPU if this machine has a usable one and else the CPU. TREFOIL_KERNELS
 * chooses where the kernels of the CPU come from; `kernelSource` of the device tells which it has.
 */
export function openDevice(kind: 'cpu', options?: OpenDeviceOptions): HostDevice;
export function openDevice(kind?: DeviceKind | 'auto', options?: OpenDeviceOptions): Device;
export function openDevice(kind: DeviceKind | 'auto' = 'auto', options: OpenDeviceOptions = {}): Device {
  if (kind !== 'auto' && kind !== 'cpu' && kind !== 'cuda')
    throw new UsageError(`openDevice: unknown device ${String(kind)}; use 'auto', 'cpu' or 'cuda'`);
  const { threads, index = 0, deterministic = false, progress, warn } = options;
  const absence = kind === 'cpu' ? 'not requested' : cudaAbsence();
  const report = progress ? { progress } : {};
  if (absence === null) return new CudaDevice({ index, compiler: report, deterministic });
  if (kind === 'cuda') throw new UsageError(`openDevice('cuda'): ${absence}; use 'auto' to fall back to the CPU`);
  const given = threads === undefined ? {} : { threads };
  const choice = chooseKernels(process.env, { ...defaultCompilerOptions(process.env), ...report });
  const { kind: source, compiler, warning } = choice;
  if (warning !== null) warn?.(warning);
  if (source === 'wasm') return openWasmDevice(given);
  return new CpuDevice({ compiler, ...given });
}
