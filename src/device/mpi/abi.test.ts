import { expect, test } from 'vitest';
import { MPI_ABIS, openMpiLibrary } from './abi.js';

const [openMpi] = MPI_ABIS;

test('a missing library is named with the remedy', () => {
  const absent = { ...openMpi, files: ['libmpi-missing.so.1', '/no/such/libmpi.so'] };
  expect(() => openMpiLibrary([absent])).toThrow(/no MPI library was found: install Open MPI \(Debian.*openmpi-bin/);
});

test('an unsupported implementation is named by its file', () => {
  const libc = { ...openMpi, files: ['libc.so.6'] };
  expect(() => openMpiLibrary([libc])).toThrow('libc.so.6 is not a supported implementation (Open MPI)');
});
