/** Memory of the host that the GPU copies from and to by itself. */
import type { HostMemory } from '../device.js';
import koffi from '../koffi.js';
import type { Driver } from './driver.js';

const EVENT_WITHOUT_TIME = 2;

export function pinnedMemory(driver: Driver, stream: bigint, size: number): HostMemory {
  const address = driver.get('cuMemAllocHost_v2', size);
  const event = driver.get('cuEventCreate', EVENT_WITHOUT_TIME);
  const recorded = () => {
    driver.call('cuEventRecord', event, stream);
    return () => driver.call('cuEventSynchronize', event);
  };
  return {
    bytes: new Uint8Array(koffi.view(address, size)),
    upload: (to, bytes) => {
      driver.call('cuMemcpyHtoDAsync_v2', to, address, bytes, stream);
      return recorded();
    },
    download: (from, bytes) => {
      driver.call('cuMemcpyDtoHAsync_v2', address, from, bytes, stream);
      return recorded();
    },
    free: () => {
      driver.call('cuMemFreeHost', address);
      driver.call('cuEventDestroy_v2', event);
    },
  };
}
