/** The measured peak of whatever computes, in FLOP/s: what MFU refers to. */

import { CudaDevice } from '../../device/cuda/cuda.js';
import type { Device } from '../../device/device.js';
import { isHostDevice } from '../../device/device.js';
import { castInto } from '../../ops/cast/op.js';
import { fillNormal } from '../../tensor/random/op.js';
import { Tensor } from '../../tensor/tensor.js';
import { measurePeak } from './op.js';

/** A quick measurement at the start of a run. */
export function measureDevicePeak(device: Device): number {
  if (device instanceof CudaDevice) return measureMatrixPeak(device);
  if (isHostDevice(device)) return measurePeak(device);
  throw new Error(`no peak can be measured on ${device.name}`);
}

const SIZE = 8192;
const REPEATS = 9;

/** FLOP/s of the median of several products of two random matrices: zeros would run faster than real data does. */
function measureMatrixPeak(device: CudaDevice): number {
  const [a, b, d] = Array.from({ length: 3 }, () => Tensor.empty(device, [SIZE, SIZE], 'bf16'));
  const numbers = Tensor.empty(device, [SIZE, SIZE]);
  [a, b].forEach((matrix, stream) => {
    fillNormal(numbers, { seed: 1, stream });
    castInto(device, numbers, matrix);
  });
  const product = () => device.matrixProduct({ a, b, d, m: SIZE, n: SIZE, k: SIZE, transposeB: true });
  device.time(product, 3); // wakes the clocks
  const times = device.time(product, REPEATS).sort((x, y) => x - y);
  for (const tensor of [a, b, d, numbers]) tensor.free();
  return (2 * SIZE ** 3) / (times[Math.floor(REPEATS / 2)] / 1000);
}
