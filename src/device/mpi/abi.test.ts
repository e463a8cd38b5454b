import { expect, test } from 'vitest';
import { MPI_ABIS, openMpiLibrary } from './abi.js';

const [openMpi] = MPI_ABIS;

test('a library that is not there is named with what to install', () => {
  const absent = { ...openMpi, files: ['libmpi-of-nobody.so.1', '/no/such/libmpi.so'] };
  expect(() => openMpiLibrary([absent])).toThrow(/no MPI library was found: install Open MPI \(Debian.*openmpi-bin/);
});

test('a library of another kind is refused by its file', () => {
  const libc = { ...openMpi, files: ['libc.so.6'] };
  expect(() => openMpiLibrary([libc])).toThrow('libc.so.6 is not of a kind known here (Open MPI)');
});
