/** The devices a test runs on. Every operation's test runs on each; a device that is absent is named, never passed over. */
import { CpuDevice } from '../device/cpu/cpu.js';
import type { Device } from '../device/device.js';

let shared: CpuDevice | null = null;

/** One CPU device per test process: kernels are loaded once. */
export function cpu(): CpuDevice {
  shared ??= new CpuDevice();
  return shared;
}

/** For `describe.each(devices())`: a name and how to get the device. */
export function devices(): { name: string; device: () => Device }[] {
  return [{ name: 'cpu', device: cpu }];
}

/** How far a backend may be from the float64 reference, as ‖a-b‖/‖b‖. */
export function tolerance(device: Device): number {
  return device.kind === 'cpu' ? 2e-5 : 1e-2;
}
