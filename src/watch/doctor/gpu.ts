/** The GPU rows of `doctor`: CUDA device, memory, libraries. */
import { existsSync, readFileSync } from 'node:fs';
import { findBackend } from '../../device/cuda/compile.js';
import { cublasLtIdentity } from '../../device/cuda/cublaslt.js';
import { CudaDevice, cudaAbsence } from '../../device/cuda/cuda.js';
import { DRIVER, LibraryMissing, openLibrary } from '../../device/cuda/libraries.js';
import { NcclLibrary } from '../../device/cuda/nccl-library.js';
import { TrefoilError } from '../../errors.js';
import { type DoctorRow, fail, fine, warn } from './row.js';

const DRIVER_FILE = '/proc/driver/nvidia/version';
const MIB = 2 ** 20;

/** The GPUs of the machine. */
export function gpuRows(): DoctorRow[] {
  const driver = driverVersion();
  const rows = driver === undefined ? [] : [fine('gpu driver', driver)];
  return [...rows, deviceRow(), ...(hasDriver() ? cudaLibraryRows() : [])];
}

function deviceRow(): DoctorRow {
  const absence = cudaAbsence();
  if (absence !== null) {
    return warn('gpu', absence, 'without one, training uses the CPU');
  }
  try {
    const { name, totalBytes } = new CudaDevice();
    return fine('gpu', `${name}, ${Math.round(totalBytes / MIB)} MiB`);
  } catch (error) {
    if (!(error instanceof TrefoilError)) throw error;
    return fail('gpu', 'there, but cannot be used', error.message);
  }
}

/** Names and versions of the libraries that a GPU needs; each throws `LibraryMissing`. */
export interface CudaLibraries {
  compiler(): string;
  products(): string;
  collectives(): string;
}

const INSTALLED: CudaLibraries = {
  compiler: () => findBackend().identity,
  products: () => cublasLtIdentity(),
  collectives: () => `NCCL ${new NcclLibrary().version}`,
};

/**
 * Without a compiler training uses the CPU; without cuBLASLt it would fail at the first matrix product; without NCCL it
 * uses only one GPU.
 */
export function cudaLibraryRows(libraries: CudaLibraries = INSTALLED): DoctorRow[] {
  return [
    libraryRow('cuda compiler', libraries.compiler, warn),
    libraryRow('cuda matrix products', libraries.products, fail),
    libraryRow('cuda collectives', libraries.collectives, warn),
  ];
}

function libraryRow(check: string, find: () => string, missing: typeof fail): DoctorRow {
  try {
    return fine(check, find());
  } catch (error) {
    if (!(error instanceof LibraryMissing)) throw error;
    return missing(check, error.found, error.remedy);
  }
}

/** Libraries are reported only if there is a driver. */
function hasDriver(): boolean {
  try {
    openLibrary(DRIVER);
    return true;
  } catch (error) {
    if (!(error instanceof LibraryMissing)) throw error;
    return false;
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
