import { join } from 'node:path';
import { afterAll, describe, expect, it, vi } from 'vitest';
import { KernelCompiler } from '../../device/cpu/compile.js';
import { CpuDevice } from '../../device/cpu/cpu.js';
import { runTraining, type TinyOverrides, temporaryFolder, tinyConfig } from '../../testing/run.js';
import { needsKernel } from './device.js';

const folder = temporaryFolder();
afterAll(() => folder.remove());

describe('kernels that are compiled before a training', () => {
  it.each<[string, TinyOverrides]>([
    ['sparse', {}],
    ['dense', { model: { attention: 'dense' } }],
    ['muon', { train: { optimizer: 'muon' } }],
  ])('are all that it uses: %s', async (name, overrides) => {
    const library = vi.spyOn(KernelCompiler.prototype, 'library');
    try {
      const config = tinyConfig(join(folder.path, name), {
        ...overrides,
        train: { steps: 2, eval_every: 2, sample_every: 2, ...overrides.train },
      });
      await runTraining(config, { device: new CpuDevice() });
      const used = library.mock.calls.map(([source]) => /src\/(.*)\/\w+\.cpp$/.exec(source)![1]);
      expect(used.length).toBeGreaterThan(8);
      expect(used.filter((kernel) => !needsKernel(config, kernel))).toEqual([]);
    } finally {
      library.mockRestore();
    }
  });

  it('leave out what the config does not need', () => {
    const needed = (overrides: TinyOverrides, kernel: string) =>
      needsKernel(tinyConfig(join(folder.path, 'none'), overrides), kernel);
    expect(needed({}, 'ops/attention/dense')).toBe(false);
    expect(needed({ model: { attention: 'dense' } }, 'ops/attention/selected')).toBe(false);
    expect(needed({}, 'ops/muon')).toBe(false);
    expect(needed({}, 'device/mpi')).toBe(false);
  });
});
