/** The devices of this machine, as commands ask for them. */
import { Option } from 'commander';
import { CpuDevice } from '../device/cpu/cpu.js';
import type { Device, DeviceKind } from '../device/device.js';
import { UsageError } from '../errors.js';

export type DeviceChoice = DeviceKind | 'auto';

export interface DeviceOptions {
  readonly device: DeviceChoice;
  readonly threads?: number;
}

export function deviceOption(description: string): Option {
  return new Option('--device <name>', description).choices(['auto', 'cpu', 'cuda']).default('auto');
}

/** Why there is no CUDA here. */
export function cudaAbsence(): string {
  return 'no CUDA backend in this build';
}

/** One device: the one named, or the fastest there is. */
export function openDevice({ device, threads }: DeviceOptions): Device {
  if (device === 'cuda') throw new UsageError(`--device cuda: ${cudaAbsence()}; use --device cpu`);
  return openCpu(threads);
}

export interface DeviceList {
  readonly present: readonly Device[];
  readonly absent: readonly { readonly kind: DeviceKind; readonly reason: string }[];
}

/** The device named, or with `auto` all there are, and those there are not with the reason. */
export function listDevices(options: DeviceOptions): DeviceList {
  if (options.device !== 'auto') return { present: [openDevice(options)], absent: [] };
  return { present: [openCpu(options.threads)], absent: [{ kind: 'cuda', reason: cudaAbsence() }] };
}

function openCpu(threads: number | undefined): CpuDevice {
  return new CpuDevice(threads === undefined ? {} : { threads });
}
