/** The GPU rows of doctor. The one place that knows about NVIDIA's driver here; a CUDA device connects to it. */
import { existsSync, readFileSync } from 'node:fs';
import koffi from 'koffi';
import { type DoctorRow, fine, warn } from './row.js';

const DRIVER_FILE = '/proc/driver/nvidia/version';
const DRIVER_LIBRARIES = ['libcuda.so.1', 'libcuda.so', 'nvcuda.dll'];

/** What there is to compute on beside the CPU. */
export function gpuRows(): DoctorRow[] {
  const driver = driverVersion();
  const library = DRIVER_LIBRARIES.find(canLoad);
  if (library === undefined)
    return [
      driver === undefined
        ? warn('gpu', 'no CUDA driver', 'training uses the CPU; for a GPU install NVIDIA’s driver')
        : warn('gpu', `kernel driver ${driver} without libcuda`, 'install the driver’s libraries (libcuda.so.1)'),
    ];
  if (!existsSync('/dev/nvidiactl'))
    return [warn('gpu', `${library} without a device`, 'no NVIDIA device is visible here; in a container, pass it in')];
  return [
    fine('gpu driver', driver ?? library),
    warn('gpu', 'a CUDA driver, and no CUDA backend in this build', 'training uses the CPU'),
  ];
}

/** Memory of the GPU that training would use, in MiB; null when training cannot use one. */
export function gpuMemoryMib(): number | null {
  return null;
}

function driverVersion(): string | undefined {
  if (!existsSync(DRIVER_FILE)) return undefined;
  return /Kernel Module\s+(?:for \S+\s+)?([\d.]+)/.exec(readFileSync(DRIVER_FILE, 'utf8'))?.[1] ?? 'unknown';
}

function canLoad(library: string): boolean {
  try {
    koffi.load(library).unload();
    return true;
  } catch {
    return false; // Not there, or not for this processor: both mean that it cannot be used, which is the question.
  }
}
