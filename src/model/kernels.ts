/** Which attention kernels a config asks for, and in words which of them serve. */
import type { Config } from '../config/schema.js';
import type { Device } from '../device/device.js';
import type { SparseOptions } from '../ops/nsa.js';
import { chooseSelectionKernel } from '../ops/selected/op.js';

/** `use_sel_pack: false` means no sharing between queries: v1. */
export function kernelOptions({ runtime }: Pick<Config, 'runtime'>): SparseOptions {
  const kernel = runtime.use_sel_pack ? runtime.selection_kernel : 'v1';
  return { kernel, sharedFrom: runtime.sel_v2_min_s, parity: runtime.force_parity };
}

/** One line for runtime.sdpa_audit: what serves each branch at this length. */
export function auditKernels(config: Pick<Config, 'runtime' | 'model'>, device: Device, longest: number): string {
  if (config.model.attention === 'dense') return `attention kernels: dense = ${device.kind} fp32`;
  const options = kernelOptions(config);
  if (options.parity) return 'attention kernels: all branches = float64 reference (force_parity)';
  const selected = chooseSelectionKernel(longest, options);
  return `attention kernels at S = ${longest}: cmp = ${device.kind} fp32, score = ${device.kind} fp32, sel = ${selected}, win = ${device.kind} fp32`;
}
