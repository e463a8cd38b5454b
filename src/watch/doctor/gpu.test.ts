import { describe, expect, it } from 'vitest';
import { cublasLtIdentity } from '../../device/cuda/cublaslt.js';
import { cudaAbsence } from '../../device/cuda/cuda.js';
import { CUBLASLT, NCCL, NVRTC, openLibrary } from '../../device/cuda/libraries.js';
import { cudaLibraryRows, gpuRows } from './gpu.js';

/** Opens a library that is nowhere, under the name of a real one. */
const lost = (name: typeof NVRTC) => () => {
  openLibrary({ ...name, files: ['libthat-is-nowhere.so.1'] }, {});
  return 'found';
};

describe('rows of the CUDA libraries', () => {
  it('name what is there', () => {
    const libraries = {
      compiler: () => 'NVRTC 13.0',
      products: () => 'cuBLASLt 13.0.2',
      collectives: () => 'NCCL 2.28',
    };
    expect(cudaLibraryRows(libraries)).toEqual([
      { check: 'cuda compiler', level: 'green', found: 'NVRTC 13.0', remedy: '' },
      { check: 'cuda matrix products', level: 'green', found: 'cuBLASLt 13.0.2', remedy: '' },
      { check: 'cuda collectives', level: 'green', found: 'NCCL 2.28', remedy: '' },
    ]);
  });

  it('say what to install where one is missing', () => {
    const libraries = { compiler: lost(NVRTC), products: lost(CUBLASLT), collectives: lost(NCCL) };
    expect(cudaLibraryRows(libraries)).toEqual([
      { check: 'cuda compiler', level: 'yellow', found: `${NVRTC.title} was not found`, remedy: NVRTC.remedy },
      {
        check: 'cuda matrix products',
        level: 'red',
        found: `${CUBLASLT.title} was not found`,
        remedy: CUBLASLT.remedy,
      },
      { check: 'cuda collectives', level: 'yellow', found: `${NCCL.title} was not found`, remedy: NCCL.remedy },
    ]);
  });

  it('do not hide an error of another kind', () => {
    const broken = () => {
      throw new Error('not about a library');
    };
    expect(() => cudaLibraryRows({ compiler: broken, products: broken, collectives: broken })).toThrow(
      'not about a library',
    );
  });

  it('are green where CUDA works', ({ skip }) => {
    const absence = cudaAbsence();
    if (absence) skip(absence);
    const rows = gpuRows().filter(({ check }) => check.startsWith('cuda '));
    expect(rows.slice(0, 2).map(({ level }) => level)).toEqual(['green', 'green']);
    expect(rows[2].found).toMatch(/NCCL/); // one GPU needs none
    expect(cublasLtIdentity()).toMatch(/^cuBLASLt 1[2-9]\.\d+\.\d+$/);
  });

  it('are left out where there is no driver', ({ skip }) => {
    if (!/libcuda|no NVIDIA GPU found/.test(cudaAbsence() ?? '')) skip('this machine has a CUDA driver');
    expect(gpuRows().map(({ check, level }) => [check, level])).toEqual([['gpu', 'yellow']]);
  });
});
