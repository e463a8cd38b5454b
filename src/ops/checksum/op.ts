/**
 * A 64-bit checksum of device memory, at the speed of that memory: what is copied between a GPU and files is verified
 * where it lies. It finds damage, not forgery: anyone can compute it.
 */
import { type Device, defineKernels } from '../../device/device.js';
import { Tensor } from '../../tensor/tensor.js';
import { launchers } from './cuda.js';

export const signatures = {
  /** Bytes, their number, and the u64 to which the checksum is added. */
  checksum_add: ['ptr', 'i64', 'ptr'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** The checksum of the bytes of each tensor, which is aligned to 8 bytes (`checksumReference`). Waits for the device. */
export function checksums(device: Device, tensors: readonly Tensor[]): bigint[] {
  const sums = Tensor.zeros(device, [tensors.length], 'f64');
  try {
    tensors.forEach((tensor, i) => {
      if (tensor.pointer % 8n !== 0n) throw new Error(`checksum: ${tensor} is not aligned to 8 bytes`);
      device.kernels(kernels).checksum_add(tensor, tensor.bytes, sums.rows(i, i + 1));
    });
    return [...new BigUint64Array(sums.readBytes().buffer)];
  } finally {
    sums.free();
  }
}
