/**
 * Finds an MPI library and its handles. MPI standardises function names, not the representation of communicators and datatypes:
 * another implementation is another entry of MPI_ABIS.
 */
import { existsSync } from 'node:fs';
import { UsageError } from '../../errors.js';
import koffi from '../koffi.js';

export type Library = ReturnType<typeof koffi.load>;

export interface MpiAbi {
  readonly name: string;
  /** File names in order of preference; a bare name is searched in the system's library path. */
  readonly files: readonly string[];
  /** A symbol that only this implementation has. */
  readonly mark: string;
  handles(library: Library): MpiHandles;
}

export interface MpiHandles {
  readonly world: bigint;
  readonly byte: bigint;
  /** The error handler with which functions return an error code instead of aborting. */
  readonly errorsReturn: bigint;
  readonly inPlace: bigint;
  readonly ignoreStatus: bigint;
}

const OPEN_MPI: MpiAbi = {
  name: 'Open MPI',
  files: [
    'libmpi.so.40',
    'libmpi.so',
    'libmpi.40.dylib',
    '/opt/homebrew/lib/libmpi.dylib',
    '/usr/local/lib/libmpi.dylib',
  ],
  mark: 'ompi_mpi_comm_world',
  // Handles are addresses of exported variables.
  handles: (library) => {
    const at = (name: string): bigint => koffi.address(library.symbol(name));
    return {
      world: at('ompi_mpi_comm_world'),
      byte: at('ompi_mpi_byte'),
      errorsReturn: at('ompi_mpi_errors_return'),
      inPlace: 1n,
      ignoreStatus: 0n,
    };
  },
};

export const MPI_ABIS: readonly MpiAbi[] = [OPEN_MPI];

const REMEDY =
  'install Open MPI (Debian and Ubuntu: apt-get install openmpi-bin libopenmpi3; macOS: brew install open-mpi)';

/** Opens the first library that exists and is of a known implementation. */
export function openMpiLibrary(abis: readonly MpiAbi[] = MPI_ABIS): { abi: MpiAbi; library: Library } {
  const unknown: string[] = [];
  for (const abi of abis)
    for (const file of abi.files) {
      const library = tryLoad(file);
      if (!library) continue;
      if (hasSymbol(library, abi.mark)) return { abi, library };
      unknown.push(file);
    }
  const known = abis.map(({ name }) => name).join(', ');
  const found =
    unknown.length > 0 ? `${unknown[0]} is not a supported implementation (${known})` : 'no MPI library was found';
  throw new UsageError(`ranks on CPUs need MPI, and ${found}: ${REMEDY}`);
}

/** Null if there is no such file: the loader's message would not help. */
function tryLoad(file: string): Library | null {
  if (file.startsWith('/') && !existsSync(file)) return null;
  try {
    // Global symbols: components that Open MPI loads later need them.
    return koffi.load(file, { global: true });
  } catch {
    return null;
  }
}

function hasSymbol(library: Library, name: string): boolean {
  try {
    return koffi.address(library.symbol(name)) !== 0n;
  } catch {
    return false;
  }
}
