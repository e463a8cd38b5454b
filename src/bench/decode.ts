/** Decode and prefill of a whole model by length, with the time of each branch and of the same model with dense attention. */
import { CudaDevice } from '../device/cuda/cuda.js';
import type { Device } from '../device/device.js';
import { predictedReads } from '../model/cache.js';
import type { ModelShape } from '../model/shape.js';
import * as onCpu from './decode-cpu.js';
import * as onGpu from './decode-cuda.js';
import type { DecodeBench, DecodeRow, PrefillRow, PrefillTimes } from './decode-setup.js';

/** One new token for each of `batch` sequences of length S (the token included), for each of the lengths. */
export function benchDecode(
  device: Device,
  lengths: readonly number[],
  bench: DecodeBench,
  onRow: (row: DecodeRow) => void = () => {},
): DecodeRow[] {
  const { shape, batch, runs } = bench;
  const measure = (measured: ModelShape) =>
    device instanceof CudaDevice
      ? onGpu.measureSteps(device, { shape: measured, lengths, batch, runs })
      : onCpu.measureSteps(device, { shape: measured, lengths, batch, runs });
  const denseMs = timesOfDense(bench, lengths, measure);
  return measure(shape).map(({ ms, branches, reads }, i) => {
    const S = lengths[i];
    const row = {
      S,
      batch,
      ms_total: ms,
      ...branches,
      ms_dense: denseMs[i],
      reads_measured: reads,
      reads_predicted: predictedReads(shape, S),
      tokens_per_s: (1000 * batch) / ms,
    };
    onRow(row);
    return row;
  });
}

/** `batch` prompts of S tokens, read at once into an empty cache. */
export function benchPrefill(
  device: Device,
  lengths: readonly number[],
  bench: DecodeBench,
  onRow: (row: PrefillRow) => void = () => {},
): PrefillRow[] {
  const { shape, batch, runs } = bench;
  const measure = (measured: ModelShape) =>
    device instanceof CudaDevice
      ? onGpu.measurePrefills(device, { shape: measured, lengths, batch, runs })
      : onCpu.measurePrefills(device, { shape: measured, lengths, batch, runs });
  const denseMs = timesOfDense(bench, lengths, measure);
  return measure(shape).map(({ ms, branches }, i) => {
    const tokens_per_s = (1000 * batch * lengths[i]) / ms;
    const row = { S: lengths[i], batch, ms_total: ms, ...branches, ms_dense: denseMs[i], tokens_per_s };
    onRow(row);
    return row;
  });
}

function timesOfDense(
  { shape, dense }: DecodeBench,
  lengths: readonly number[],
  measure: (shape: ModelShape) => PrefillTimes[],
): number[] {
  return dense ? measure({ ...shape, attention: 'dense' }).map(({ ms }) => ms) : lengths.map(() => Number.NaN);
}
