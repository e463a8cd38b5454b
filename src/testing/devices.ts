/** The devices a test runs on. Every operation's test runs on each; an absent one is reported as a skipped test. */
import { describe, expect, it } from 'vitest';
import { CpuDevice } from '../device/cpu/cpu.js';
import { findBackend } from '../device/cuda/compile.js';
import { CudaDevice, cudaAbsence } from '../device/cuda/cuda.js';
import { LibraryMissing } from '../device/cuda/libraries.js';
import type { Device } from '../device/device.js';
import type { WasmDevice } from '../device/wasm/device.js';
import { openWasmDevice } from '../device/wasm/node.js';
import { bfloat16ToFloat32, float32ToBfloat16 } from '../tensor/bfloat16.js';

let shared: {
  readonly file: string | undefined;
  cpu?: CpuDevice;
  wasm?: WasmDevice;
  plainWasm?: WasmDevice;
  cuda?: CudaDevice;
} = {
  file: undefined,
};

/** The devices of the current test file: files may share a process, and a test may count what is allocated. */
function devicesOfFile(): typeof shared {
  const file = expect.getState().testPath;
  if (file !== shared.file) shared = { file };
  return shared;
}

/** One CPU device per test file: kernels are loaded once. */
export function cpu(): CpuDevice {
  const devices = devicesOfFile();
  devices.cpu ??= new CpuDevice();
  return devices.cpu;
}

export function wasm(): WasmDevice {
  const devices = devicesOfFile();
  devices.wasm ??= openWasmDevice();
  return devices.wasm;
}

/** The file without fused products, which `wasm` takes only where the other one does not run. */
function plainWasm(): WasmDevice {
  const devices = devicesOfFile();
  devices.plainWasm ??= openWasmDevice({ plain: true });
  return devices.plainWasm;
}

export function cuda(): CudaDevice {
  const devices = devicesOfFile();
  devices.cuda ??= new CudaDevice();
  return devices.cuda;
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
  /** Type of activations. */
  readonly dtype: Precision;
}

/** For `describe.each(devices())`: a name, how to get the device, and the dtype to compute in. */
export function devices(): TestDevice[] {
  const list: TestDevice[] = [
    { name: 'cpu', device: cpu, dtype: 'f32' },
    { name: 'cpu in WebAssembly', device: wasm, dtype: 'f32' },
  ];
  // Node 20 runs the plain file only.
  if (Number.parseInt(process.versions.node, 10) >= 22)
    list.push({ name: 'cpu in WebAssembly without fused products', device: plainWasm, dtype: 'f32' });
  const absence = cudaAbsence();
  if (absence === null)
    list.push({ name: 'cuda', device: cuda, dtype: 'f32' }, { name: 'cuda in bf16', device: cuda, dtype: 'bf16' });
  else reportNoGpu(absence);
  return list;
}

/** Reports the tests that a file has only where there is a GPU. */
export function reportNoGpu(absence: string): void {
  it('on a GPU', ({ skip }) => skip(absence));
}

/** `describe`, or one test that is skipped with the reason. */
export function describeUnless(absence: string | null, name: string, tests: () => void): void {
  if (absence === null) describe(name, tests);
  else it(name, ({ skip }) => skip(absence));
}

/** The values a tensor of this dtype really holds, so that a kernel and its reference start from the same numbers. */
export function rounded(values: Float64Array, dtype: Precision): Float64Array {
  return dtype === 'f32' ? values : Float64Array.from(bfloat16ToFloat32(float32ToBfloat16(values)));
}

/** How far a backend may be from the float64 reference, as ‖a-b‖/‖b‖. */
export function tolerance(dtype: Precision): number {
  return dtype === 'f32' ? 2e-5 : 1e-2;
}
