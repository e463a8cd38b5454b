/** The attention kernels that a config requests, and a description of those that are used. */
import type { Config } from '../config/schema.js';
import { cudaRuntime } from '../device/cuda/runtime.js';
import type { Device } from '../device/device.js';
import { denseRefusal } from '../ops/attention/fused/dense.js';
import { fusedBuild, fusedPath, fusedRefusal } from '../ops/attention/fused/op.js';
import type { SparseOptions } from '../ops/attention/nsa.js';
import { chooseSelectionKernel, type SelectionKernel } from '../ops/attention/selected/op.js';
import { computeDtype, headShapeOf, modelShape, sparseShapeOf } from './shape.js';

/** `use_sel_pack: false` means no sharing between queries: v1. */
export function kernelOptions({ runtime }: Pick<Config, 'runtime'>): SparseOptions {
  const kernel = runtime.use_sel_pack ? runtime.selection_kernel : 'v1';
  return {
    kernel,
    sharedFrom: runtime.sel_v2_min_s,
    parity: runtime.force_parity,
    deterministic: runtime.deterministic,
    fusedFrom: fusedFrom(runtime),
  };
}

/**
 * Minimum sequence length for the fused kernels; `Infinity` disables them. They compute all branches, so disabling one
 * branch disables them all. The switch of a branch overrides the global one; a length of -1 and force_parity override both.
 */
function fusedFrom(runtime: Config['runtime']): number {
  const switches = [runtime.use_fa2_win ?? runtime.use_fa2, runtime.use_fa2_cmp ?? runtime.use_fa2];
  const lengths = [runtime.fa2_min_len_win, runtime.fa2_min_len_cmp];
  const isWanted = !runtime.force_parity && switches.every(Boolean) && lengths.every((length) => length >= 0);
  return isWanted ? Math.max(...lengths) : Number.POSITIVE_INFINITY;
}

type KernelConfig = Pick<Config, 'runtime' | 'model' | 'nsa'>;

/** Attention over sequences of up to `longest` tokens, as the fused kernels are asked about it. */
function problemOf({ runtime, model, nsa }: KernelConfig, device: Device, longest: number) {
  const shape = modelShape({ model, nsa }, 1);
  return {
    heads: headShapeOf(shape),
    sparse: sparseShapeOf(shape),
    dtype: computeDtype(runtime, device.kind),
    tokens: { total: longest, longest },
  };
}

/** The kernel of the selected branch that serves sequences of up to `longest` tokens. */
export function selectionKernel(config: KernelConfig, device: Device, longest: number): SelectionKernel {
  const options = kernelOptions(config);
  if (fusedRefusal(problemOf(config, device, longest), device, options) !== null)
    return chooseSelectionKernel(longest, options);
  return fusedBuild(options).queryMajor ? 'v1' : 'v2';
}

/** One line for runtime.sdpa_audit: what serves each branch at this length. */
export function auditKernels(config: KernelConfig, device: Device, longest: number): string {
  const { model } = config;
  const options = kernelOptions(config);
  const problem = problemOf(config, device, longest);
  const plain = `${device.kind} ${problem.dtype === 'bf16' ? 'bf16' : 'fp32'}`;
  const fused = `${plain}, fused, ${tensorCores(device)}`;
  const because = (refusal: string) => (device.kind === 'cuda' ? ` (branch kernels: ${refusal})` : '');
  if (model.attention === 'dense') {
    const refusal = denseRefusal(problem, device, options);
    return `attention kernels at S = ${longest}: dense = ${refusal === null ? fused : plain + because(refusal)}`;
  }
  if (options.parity) return 'attention kernels: all branches = float64 reference (force_parity)';
  const refusal = fusedRefusal(problem, device, options);
  const [others, selected] =
    refusal === null ? [fused, fusedSelection(options)] : [plain, chooseSelectionKernel(longest, options)];
  const branches = `cmp = ${others}, score = ${others}, sel = ${selected}, win = ${others}`;
  return `attention kernels at S = ${longest}: ${branches}${refusal === null ? '' : because(refusal)}`;
}

/** What multiplies matrices inside the fused kernels. */
function tensorCores(device: Device): string {
  return cudaRuntime(device)?.architecture === 90 ? 'wgmma' : 'mma.sync';
}

function fusedSelection(options: SparseOptions): string {
  if (fusedBuild(options).queryMajor) return 'v1 (query-major)';
  const path = fusedPath(options);
  return path === 'adaptive' ? 'v2 (tile-union or KV-outer, chosen on the device)' : `v2 (${path})`;
}
