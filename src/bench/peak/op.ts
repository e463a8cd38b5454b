/** The measured fused-multiply-add peak of the CPU: what every share of peak in this project refers to. */
import type { CpuDevice } from '../../device/cpu/cpu.js';
import { defineKernels } from '../../device/device.js';
import { Tensor } from '../../tensor/tensor.js';

const kernels = defineKernels(import.meta.url, { peak_fma: ['ptr', 'i64', 'i64'] });

const ROUNDS = 400_000;
const REPEATS = 12;

/** FLOP/s with the device's threads: the best of several short runs, because noise only ever slows one down. */
export function measurePeak(device: CpuDevice, repeats = REPEATS): number {
  const { threads } = device;
  const out = Tensor.empty(device, [1 + threads], 'f64');
  const kernel = device.kernels(kernels);
  kernel.peak_fma(out, threads, ROUNDS); // wakes the threads and the clock
  let best = 0;
  for (let i = 0; i < repeats; i++) {
    const started = performance.now();
    kernel.peak_fma(out, threads, ROUNDS);
    const seconds = (performance.now() - started) / 1000;
    best = Math.max(best, out.item(0) / seconds);
  }
  out.free();
  return best;
}
