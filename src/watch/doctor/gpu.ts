/** The GPU rows of doctor: is there a CUDA device that training can use, and how much memory has it? */
import { existsSync, readFileSync } from 'node:fs';
import { CudaDevice, cudaAbsence } from '../../device/cuda/cuda.js';
import { TrefoilError } from '../../errors.js';
import { type DoctorRow, fail, fine, warn } from './row.js';

const DRIVER_FILE = '/proc/driver/nvidia/version';
const MIB = 2 ** 20;

/** What there is to compute on beside the CPU. */
export function gpuRows(): DoctorRow[] {
  const absence = cudaAbsence();
  const driver = driverVersion();
  const rows = driver === undefined ? [] : [fine('gpu driver', driver)];
  if (absence !== null) {
    const remedy = 'training uses the CPU; for a GPU install NVIDIA’s driver, and in a container pass the device in';
    return [...rows, warn('gpu', absence, remedy)];
  }
  try {
    const { name, totalBytes } = new CudaDevice();
    return [...rows, fine('gpu', `${name}, ${Math.round(totalBytes / MIB)} MiB`)];
  } catch (error) {
    if (!(error instanceof TrefoilError)) throw error;
    return [...rows, fail('gpu', 'there, but cannot be used', error.message)];
  }
}

/** Memory of the GPU that training would use, in MiB; null when training cannot use one. */
export function gpuMemoryMib(): number | null {
  if (cudaAbsence() !== null) return null;
  try {
    return Math.round(new CudaDevice().totalBytes / MIB);
  } catch (error) {
    if (!(error instanceof TrefoilError)) throw error;
    return null; // gpuRows says why
  }
}

function driverVersion(): string | undefined {
  if (!existsSync(DRIVER_FILE)) return undefined;
  return /Kernel Module\s+(?:for \S+\s+)?([\d.]+)/.exec(readFileSync(DRIVER_FILE, 'utf8'))?.[1] ?? 'unknown';
}
