import { describe, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import type { Config } from '../config/schema.js';
import type { Device } from '../device/device.js';
import { cpu } from '../testing/devices.js';
import { auditKernels, describeKernels, kernelOptions, selectionKernel } from './kernels.js';

const config = (runtime: Partial<Config['runtime']> = {}, model: Partial<Config['model']> = {}) =>
  parseConfig({ model: { dim: 768, n_heads: 12, n_kv_groups: 2, d_k: 64, d_v: 64, ...model }, runtime });
/** Enough of a GPU to be asked what it could do. */
const gpu = (architecture: number) => ({ kind: 'cuda', architecture, compile() {} }) as unknown as Device;

describe('kernelOptions', () => {
  const fusedFrom = (runtime: Partial<Config['runtime']>) => kernelOptions(config(runtime)).fusedFrom;

  it('takes the fused kernels at every length unless told otherwise', () => {
    expect(kernelOptions(config())).toEqual({
      kernel: 'adaptive',
      sharedFrom: 1024,
      parity: false,
      deterministic: false,
      fusedFrom: 0,
    });
    expect(kernelOptions(config({ deterministic: true, selection_kernel: 'v1' }))).toMatchObject({
      deterministic: true,
      kernel: 'v1',
    });
  });

  it('leaves the fused kernels when a branch must not use them', () => {
    expect(fusedFrom({ fused: false })).toBe(Number.POSITIVE_INFINITY);
    expect(fusedFrom({ fused_min_len: -1 })).toBe(Number.POSITIVE_INFINITY);
    expect(fusedFrom({ reference_kernels: true })).toBe(Number.POSITIVE_INFINITY);
    expect(fusedFrom({ fused_min_len: 2048 })).toBe(2048);
  });
});

describe('auditKernels', () => {
  it('names the kernels of the CPU', () => {
    expect(auditKernels(config(), cpu(), 2048)).toBe(
      'attention kernels at S = 2048: cmp = cpu fp32, score = cpu fp32, sel = v2, win = cpu fp32',
    );
    expect(auditKernels(config({ precision: 'bf16' }, { attention: 'dense' }), cpu(), 64)).toBe(
      'attention kernels at S = 64: dense = cpu fp32',
    );
    expect(auditKernels(config({ reference_kernels: true }), cpu(), 64)).toContain('float64 reference');
  });

  it('says on CUDA what is fused, and why something is not', () => {
    const fused = 'cuda bf16, fused, wgmma';
    expect(auditKernels(config({ precision: 'bf16' }), gpu(90), 512)).toBe(
      `attention kernels at S = 512: cmp = ${fused}, score = ${fused}, ` +
        `sel = v2 (tile-union or KV-outer, chosen on the device), win = ${fused}`,
    );
    expect(auditKernels(config({ precision: 'bf16', selection_kernel: 'v1' }), gpu(80), 512)).toContain(
      'sel = v1 (query-major), win = cuda bf16, fused, mma.sync',
    );
    expect(auditKernels(config({ precision: 'bf16' }, { attention: 'dense' }), gpu(90), 512)).toBe(
      `attention kernels at S = 512: dense = ${fused}`,
    );
    expect(auditKernels(config(), gpu(90), 512)).toBe(
      'attention kernels at S = 512: cmp = cuda fp32, score = cuda fp32, sel = v1, win = cuda fp32 ' +
        '(branch kernels: the fused kernels take bf16, not f32)',
    );
    expect(auditKernels(config({ precision: 'bf16', fused: false }), gpu(90), 2048)).toContain(
      'sel = v2, win = cuda bf16 (branch kernels: the fused kernels are switched off)',
    );
    expect(auditKernels(config({ precision: 'bf16' }, { d_k: 20 }), gpu(90), 2048)).toContain(
      '(branch kernels: d_k 20: multiples of 16 up to 192 are supported)',
    );
  });
});

describe('describeKernels', () => {
  it.each([
    [config({ precision: 'bf16' }), gpu(90), 'attention: using fused flash-style kernels (wgmma), selection kernel v2'],
    [
      config({ precision: 'bf16' }, { attention: 'dense' }),
      gpu(80),
      'attention: using fused flash-style kernels (mma.sync)',
    ],
    [
      config({ precision: 'bf16', fused: false }),
      gpu(90),
      'attention: kernels per branch, cuda bf16 (the fused kernels are switched off), selection kernel v1',
    ],
    [config({ selection_kernel: 'v2' }), cpu(), 'attention: kernels per branch, cpu fp32, selection kernel v2'],
    [config({ reference_kernels: true }), cpu(), 'attention: float64 reference (runtime.reference_kernels)'],
  ])('%#', (asked, device, line) => {
    expect(describeKernels(asked, device, 512)).toBe(line);
    expect(/using.*flash/i.test(line)).toBe(line.includes('fused flash'));
  });
});

describe('selectionKernel', () => {
  it('is what serves: by length on the CPU, v2 for adaptive in the fused kernels', () => {
    expect([512, 1024].map((length) => selectionKernel(config(), cpu(), length))).toEqual(['v1', 'v2']);
    const fused = (kernel: 'adaptive' | 'v1') => config({ precision: 'bf16', selection_kernel: kernel });
    expect(selectionKernel(fused('adaptive'), gpu(90), 512)).toBe('v2');
    expect(selectionKernel(fused('v1'), gpu(90), 2048)).toBe('v1');
    expect(selectionKernel(config(), gpu(90), 512)).toBe('v1'); // fp32: branch kernels
  });
});
