import { LibraryMissing, NCCL, openLibrary } from '../device/cuda/libraries.js';

/** Why there is no NCCL here; null when there is. */
export function ncclAbsence(): string | null {
  try {
    openLibrary(NCCL);
    return null;
  } catch (error) {
    if (!(error instanceof LibraryMissing)) throw error;
    return `no NCCL: ${error.message}`;
  }
}
