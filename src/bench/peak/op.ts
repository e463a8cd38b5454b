/** The measured peaks of the CPU, which every share of peak in this project refers to: multiply-adds and reading memory. */
import { defineKernels, type HostDevice } from '../../device/device.js';
import { Tensor } from '../../tensor/tensor.js';

const kernels = defineKernels(import.meta.url, {
  peak_fma: ['ptr', 'i64', 'i64'],
  peak_read: ['ptr', 'ptr', 'i64', 'i64'],
});

const ROUNDS = 400_000;
const REPEATS = 12;
/** Floats that all threads read: several times the caches. */
const READ_FLOATS = 2 ** 26;

/**
 * FLOP/s with the device's threads: the fastest thread of several short bursts, times the number of threads. Rates refer to
 * processor time, so that other programs on the machine do not lower the result.
 */
export function measurePeak(device: HostDevice, repeats = REPEATS): number {
  const { threads } = device;
  const out = Tensor.empty(device, [2, threads], 'f64');
  const kernel = device.kernels(kernels);
  kernel.peak_fma(out, threads, ROUNDS); // wakes the threads and the clock
  let best = 0;
  for (let i = 0; i < repeats; i++) {
    kernel.peak_fma(out, threads, ROUNDS);
    for (let thread = 0; thread < threads; thread++) best = Math.max(best, out.item(thread));
  }
  out.free();
  return best * threads;
}

/**
 * Bytes per second that the device's threads read from memory at once: the best of several passes, in processor time. Other
 * programs that use the memory lower it.
 */
export function measureRead(device: HostDevice, repeats = REPEATS): number {
  const { threads } = device;
  const data = Tensor.zeros(device, [READ_FLOATS]);
  const out = Tensor.empty(device, [2, threads], 'f64');
  const each = Math.floor(READ_FLOATS / threads / 64) * 64;
  let best = 0;
  for (let i = 0; i < repeats; i++) {
    device.kernels(kernels).peak_read(out, data, threads, each);
    const rates = out.read().subarray(0, threads);
    best = Math.max(
      best,
      rates.reduce((sum, rate) => sum + rate, 0),
    );
  }
  for (const tensor of [data, out]) tensor.free();
  return best;
}
