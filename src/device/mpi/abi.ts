/**
 * How an MPI library is spoken to: where it is, and what its handles are. MPI fixes the names of functions, not what a
 * communicator or a datatype is in memory; a library of another kind is another row of this table.
 */
import { existsSync } from 'node:fs';
import koffi from 'koffi';
import { UsageError } from '../../errors.js';

export type Library = ReturnType<typeof koffi.load>;

export interface MpiAbi {
  readonly name: string;
  /** File names in the order of preference; a bare name is looked for where the system looks. */
  readonly files: readonly string[];
  /** A function that only libraries of this kind have. */
  readonly mark: string;
  handles(library: Library): MpiHandles;
}

export interface MpiHandles {
  readonly world: bigint;
  readonly byte: bigint;
  /** The error handler that makes functions return a code instead of ending the program. */
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
  // Handles are addresses of variables that the library exports.
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

/** Opens the first library that is there and of a kind the table knows. */
export function openMpiLibrary(abis: readonly MpiAbi[] = MPI_ABIS): { abi: MpiAbi; library: Library } {
  const strangers: string[] = [];
  for (const abi of abis)
    for (const file of abi.files) {
      const library = tryLoad(file);
      if (!library) continue;
      if (hasSymbol(library, abi.mark)) return { abi, library };
      strangers.push(file);
    }
  const known = abis.map(({ name }) => name).join(', ');
  const found =
    strangers.length > 0 ? `${strangers[0]} is not of a kind known here (${known})` : 'no MPI library was found';
  throw new UsageError(`ranks on CPUs talk through MPI, and ${found}: ${REMEDY}`);
}

/** Null when the system has no such file; the loader's reason is of no use to anybody then. */
function tryLoad(file: string): Library | null {
  if (file.startsWith('/') && !existsSync(file)) return null;
  try {
    // Global: Open MPI loads its own components later, and they look for its symbols in the whole process.
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
