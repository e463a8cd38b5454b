/** Buffers of the host for large copies to a device. */
import koffi from 'koffi';
import { CudaDevice } from './cuda/cuda.js';
import type { Device } from './device.js';

/** Memory of the host. */
export interface HostMemory {
  readonly bytes: Uint8Array;
  free(): void;
}

/**
 * Memory from which the device copies at full speed: pinned for a GPU. An upload from it may still run when
 * `Device.upload` returns, so the device must be synchronized before it is changed.
 */
export function hostMemory(device: Device, bytes: number): HostMemory {
  if (!(device instanceof CudaDevice)) return { bytes: new Uint8Array(bytes), free: () => {} };
  const { driver } = device;
  const address = driver.get('cuMemAllocHost_v2', bytes);
  return {
    bytes: new Uint8Array(koffi.view(address, bytes)),
    free: () => driver.call('cuMemFreeHost', address),
  };
}
