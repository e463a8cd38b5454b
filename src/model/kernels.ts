/** The attention kernels that a config requests, and a description of those that are used. */
import type { Config } from '../config/schema.js';
import { cudaRuntime } from '../device/cuda/runtime.js';
import type { Device } from '../device/device.js';
import { denseRefusal } from '../ops/attention/fused/dense.js';
import { fusedBuild, fusedPath, fusedRefusal } from '../ops/attention/fused/op.js';
import type { SparseOptions } from '../ops/attention/nsa.js';
import { chooseSelectionKernel, type SelectionKernel } from '../ops/attention/selected/op.js';
import { computeDtype, headShapeOf, modelShape, sparseShapeOf } from './shape.js';

export function kernelOptions({ runtime }: Pick<Config, 'runtime'>): SparseOptions {
  return {
    kernel: runtime.selection_kernel,
    sharedFrom: runtime.selection_v2_min_len,
    parity: runtime.reference_kernels,
    deterministic: runtime.deterministic,
    fusedFrom: fusedFrom(runtime),
  };
}

/** Minimum sequence length for the fused kernels; `Infinity` disables them. */
function fusedFrom({ fused, fused_min_len: length, reference_kernels: isReference }: Config['runtime']): number {
  return fused && !isReference && length >= 0 ? length : Number.POSITIVE_INFINITY;
}

/** `train` for the kernels of training steps. */
type KernelConfig = Pick<Config, 'runtime' | 'model' | 'nsa'> & {
  readonly train?: Pick<Config['train'], 'scorer_loss'>;
};

function optionsOf(config: KernelConfig): SparseOptions {
  return { ...kernelOptions(config), scorerWeight: config.train?.scorer_loss ?? 0 };
}

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
  const options = optionsOf(config);
  if (fusedRefusal(problemOf(config, device, longest), device, options) !== null)
    return chooseSelectionKernel(longest, options);
  return fusedBuild(options).queryMajor ? 'v1' : 'v2';
}

/** The kernels that compute sparse attention of prompts, for a table. */
export function kernelLabel({ train: _, ...config }: KernelConfig, device: Device, longest: number): string {
  const options = optionsOf(config);
  if (config.model.attention === 'dense') return 'dense';
  if (options.parity) return 'reference (all branches)';
  const isFused = fusedRefusal(problemOf(config, device, longest), device, options) === null;
  return `${selectionKernel(config, device, longest)}${isFused ? ' fused' : ''}`;
}

/** One line for the log: the kind of the kernels. Runbooks look for `using … flash`, so only fused kernels say it. */
export function describeKernels(config: KernelConfig, device: Device, longest: number): string {
  const options = optionsOf(config);
  const isDense = config.model.attention === 'dense';
  if (options.parity) return 'attention: float64 reference (runtime.reference_kernels)';
  const selection = isDense ? '' : `, selection kernel ${selectionKernel(config, device, longest)}`;
  const problem = problemOf(config, device, longest);
  const refusal = isDense ? denseRefusal(problem, device, options) : fusedRefusal(problem, device, options);
  if (refusal === null) return `attention: using fused flash-style kernels (${tensorCores(device)})${selection}`;
  const because = device.kind === 'cuda' ? ` (${refusal})` : '';
  return `attention: kernels per branch, ${device.kind} ${problem.dtype === 'bf16' ? 'bf16' : 'fp32'}${because}${selection}`;
}

/** One line for runtime.print_kernels: what serves each branch at this length. */
export function auditKernels(config: KernelConfig, device: Device, longest: number): string {
  const { model } = config;
  const options = optionsOf(config);
  const problem = problemOf(config, device, longest);
  const plain = `${device.kind} ${problem.dtype === 'bf16' ? 'bf16' : 'fp32'}`;
  const fused = `${plain}, fused, ${tensorCores(device)}`;
  const because = (refusal: string) => (device.kind === 'cuda' ? ` (branch kernels: ${refusal})` : '');
  if (model.attention === 'dense') {
    const refusal = denseRefusal(problem, device, options);
    return `attention kernels at S = ${longest}: dense = ${refusal === null ? fused : plain + because(refusal)}`;
  }
  if (options.parity) return 'attention kernels: all branches = float64 reference (reference_kernels)';
  const refusal = fusedRefusal(problem, device, options);
  const [others, selected] =
    refusal === null ? [fused, fusedSelection(options)] : [plain, chooseSelectionKernel(longest, options)];
  const branches = `cmp = ${others}, score = ${others}, sel = ${selected}, win = ${others}`;
  return `attention kernels at S = ${longest}: ${branches}${refusal === null ? '' : because(refusal)}`;
}

/** The instructions that multiply matrices inside the fused kernels. */
function tensorCores(device: Device): string {
  return cudaRuntime(device)?.architecture === 90 ? 'wgmma' : 'mma.sync';
}

function fusedSelection(options: SparseOptions): string {
  if (fusedBuild(options).queryMajor) return 'v1 (query-major)';
  const path = fusedPath(options);
  return path === 'adaptive' ? 'v2 (tile-union or KV-outer, chosen on the device)' : `v2 (${path})`;
}
