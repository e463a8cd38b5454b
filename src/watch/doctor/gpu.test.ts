import { describe, expect, it } from 'vitest';
import { cublasLtIdentity } from '../../device/cuda/cublaslt.js';
import { cudaAbsence } from '../../device/cuda/cuda.js';
import { CUBLASLT, NVRTC, openLibrary } from '../../device/cuda/libraries.js';
import { cudaLibraryRows, gpuRows } from './gpu.js';

/** Opens a library that is nowhere, under the name of a real one. */
const lost = (name: typeof NVRTC) => () => {
  openLibrary({ ...name, files: ['libthat-is-nowhere.so.1'] }, {});
  return 'found';
};

describe('rows of the CUDA libraries', () => {
  it('name what is there', () => {
    expect(cudaLibraryRows({ compiler: () => 'NVRTC 13.0', products: () => 'cuBLASLt 13.0.2' })).toEqual([
      { check: 'cuda compiler', level: 'green', found: 'NVRTC 13.0', remedy: '' },
      { check: 'cuda matrix products', level: 'green', found: 'cuBLASLt 13.0.2', remedy: '' },
    ]);
  });

  it('say what to install where one is missing', () => {
    expect(cudaLibraryRows({ compiler: lost(NVRTC), products: lost(CUBLASLT) })).toEqual([
      { check: 'cuda compiler', level: 'yellow', found: `${NVRTC.title} was not found`, remedy: NVRTC.remedy },
      {
        check: 'cuda matrix products',
        level: 'red',
        found: `${CUBLASLT.title} was not found`,
        remedy: CUBLASLT.remedy,
      },
    ]);
  });

  it('do not hide an error of another kind', () => {
    const broken = () => {
      throw new Error('not about a library');
    };
    expect(() => cudaLibraryRows({ compiler: broken, products: broken })).toThrow('not about a library');
  });

  it.runIf(cudaAbsence() === null)('are green where CUDA works', () => {
    const rows = gpuRows().filter(({ check }) => check.startsWith('cuda '));
    expect(rows.map(({ level }) => level)).toEqual(['green', 'green']);
    expect(cublasLtIdentity()).toMatch(/^cuBLASLt 1[2-9]\.\d+\.\d+$/);
  });

  it.runIf(cudaAbsence()?.includes('libcuda'))('are left out where there is no driver', () => {
    expect(gpuRows().map(({ check, level }) => [check, level])).toEqual([['gpu', 'yellow']]);
  });
});
