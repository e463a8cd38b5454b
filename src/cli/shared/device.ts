/** Opens the devices that a command requests. */
import type { Config } from '../../config/schema.js';
import { defaultCompilerOptions, KernelCompiler } from '../../device/cpu/compile.js';
import { cudaAbsence, gpuCount } from '../../device/cuda/cuda.js';
import type { Device, DeviceKind } from '../../device/device.js';
import { chooseKernels } from '../../device/kernel-choice.js';
import { openDevice as open } from '../../device/open.js';
import { UsageError } from '../../errors.js';
import { CompileProgressLine } from './compile-progress.js';
import type { Io } from './io.js';
import { choice, type Flag } from './options.js';

const progress = new CompileProgressLine(process.stderr);

export type DeviceChoice = DeviceKind | 'auto';

export interface DeviceOptions {
  readonly device: DeviceChoice;
  readonly threads?: number;
  /** Chooses a GPU by the number of GPUs; defaults to the first. */
  readonly gpu?: (count: number) => number;
  /** CUDA: bitwise reproducible runs. */
  readonly deterministic?: boolean;
}

let hasWarned = false;

/** Once per process: that native kernels cannot be had. */
function warn(line: string): void {
  if (!hasWarned) process.stderr.write(`trefoil: ${line}\n`);
  hasWarned = true;
}

export function deviceOption(description = 'where to compute; auto = CUDA if available'): Flag<DeviceChoice> {
  return choice('--device <name>', description, ['auto', 'cpu', 'cuda'], 'auto');
}

/** Opens the given device; `auto` opens CUDA if available, else the CPU. */
export function openDevice({ device, threads, gpu, deterministic = false }: DeviceOptions): Device {
  const absence = device === 'cpu' ? null : cudaAbsence();
  if (device === 'cuda' && absence !== null) throw new UsageError(`--device cuda: ${absence} (or use --device cpu)`);
  const isGpu = device !== 'cpu' && absence === null;
  return open(device, {
    ...(threads === undefined ? {} : { threads }),
    ...(isGpu && gpu ? { index: gpu(gpuCount()) } : {}),
    progress,
    warn,
    deterministic,
  });
}

/** Kernels that trainings in one process rarely use; they are compiled when they are. */
const RARE = new Set(['device/mpi', 'ops/cast', 'ops/checksum']);

/** Whether a training and generation with its model use a kernel on the CPU. */
export function needsKernel({ model, train }: Pick<Config, 'model' | 'train'>, kernel: string): boolean {
  if (kernel === 'ops/muon') return train.optimizer === 'muon';
  if (kernel === 'ops/attention/dense') return model.attention === 'dense';
  if (kernel.startsWith('ops/attention/') && !kernel.startsWith('ops/attention/decode/'))
    return model.attention === 'nsa';
  return !RARE.has(kernel);
}

/**
 * Compiles the kernels of a training on the CPU at once if none has been compiled yet. This takes two thirds of the time of
 * compiling them one by one as they are needed.
 */
export async function compileColdKernels(config: Config, env: Io['env']): Promise<void> {
  const { device } = config.runtime;
  if (device === 'cuda' || (device === 'auto' && cudaAbsence() === null)) return;
  const options = { ...defaultCompilerOptions(env), progress };
  if (!new KernelCompiler(options).isCold) return; // before a compiler is looked for, which takes time
  const { kind, compiler } = chooseKernels(env, options);
  if (kind === 'native') await compiler.compileAll((kernel) => needsKernel(config, kernel));
}

/** Explains the choice of `auto`. */
export function explainAuto(device: Device): string {
  return `device: ${device.kind} (auto: ${device.kind === 'cuda' ? device.name : cudaAbsence()})`;
}

export interface DeviceList {
  readonly present: readonly Device[];
  readonly absent: readonly { readonly kind: DeviceKind; readonly reason: string }[];
}

/** Opens the given device; `auto` opens all, and lists the absent ones with the reason. */
export function listDevices(options: DeviceOptions): DeviceList {
  if (options.device !== 'auto') return { present: [openDevice(options)], absent: [] };
  const absence = cudaAbsence();
  const cpu = openDevice({ ...options, device: 'cpu' });
  if (absence !== null) return { present: [cpu], absent: [{ kind: 'cuda', reason: absence }] };
  return { present: [cpu, openDevice({ ...options, device: 'cuda' })], absent: [] };
}
