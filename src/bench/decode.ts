/** Decode and prefill of a whole model by length, with the time of each branch and of the same model with dense attention. */
import { CudaDevice } from '../device/cuda/cuda.js';
import type { Device } from '../device/device.js';
import { prefillTile } from '../infer/decode.js';
import { predictedReads } from '../model/cache.js';
import { kernelLabel, kernelOptions } from '../model/kernels.js';
import type { ModelShape } from '../model/shape.js';
import type { SparseOptions } from '../ops/attention/nsa.js';
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

/** `batch` prompts of S tokens, read at once into an empty cache, with each of the kernels of the selected branch. */
export function benchPrefill(
  device: Device,
  lengths: readonly number[],
  bench: DecodeBench,
  onRow: (row: PrefillRow) => void = () => {},
): PrefillRow[] {
  const { config, shape, batch, runs, kernels = [config.runtime.selection_kernel] } = bench;
  const tile = prefillTile(config);
  const measure = (measured: ModelShape, options: SparseOptions) => {
    const one = { shape: measured, lengths, batch, runs, kernels: options, tile };
    return device instanceof CudaDevice ? onGpu.measurePrefills(device, one) : onCpu.measurePrefills(device, one);
  };
  const denseMs = timesOfDense(bench, lengths, (dense) => measure(dense, kernelOptions(config)));
  const precision = device instanceof CudaDevice ? 'bf16' : 'fp32';
  return kernels.flatMap((kernel) => {
    const asked = { ...config, runtime: { ...config.runtime, precision, selection_kernel: kernel } as const };
    return measure(shape, kernelOptions(asked)).map(({ ms, branches }, i) => {
      const S = lengths[i];
      const first = kernelLabel(asked, device, Math.min(S, tile ?? S));
      const ran = tile !== null && tile < S ? `${first}, then pages` : first;
      const labels = { S, batch, kernel, ran };
      const row = { ...labels, ms_total: ms, ...branches, ms_dense: denseMs[i], tokens_per_s: (1000 * batch * S) / ms };
      onRow(row);
      return row;
    });
  });
}

function timesOfDense(
  { shape, dense }: DecodeBench,
  lengths: readonly number[],
  measure: (shape: ModelShape) => PrefillTimes[],
): number[] {
  return dense ? measure({ ...shape, attention: 'dense' }).map(({ ms }) => ms) : lengths.map(() => Number.NaN);
}
