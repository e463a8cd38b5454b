/** The measured peak of whatever computes, in FLOP/s: what MFU refers to. */
import { CpuDevice } from '../../device/cpu/cpu.js';
import { CudaDevice } from '../../device/cuda/cuda.js';
import type { Device } from '../../device/device.js';
import { measureMatrixPeak } from './cuda.js';
import { measurePeak } from './op.js';

/** A quick measurement at the start of a run. */
export function measureDevicePeak(device: Device): number {
  if (device instanceof CudaDevice) return measureMatrixPeak(device);
  if (device instanceof CpuDevice) return measurePeak(device);
  throw new Error(`no peak can be measured on ${device.name}`);
}
