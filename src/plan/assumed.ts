/**
 * Rates of GPUs that nothing was measured on: the measured rates times the ratio of the data sheets. A model is assumed to
 * reach the same share of the peak of matrix products, and the update the same share of the bandwidth of memory.
 */
import type { Speed } from './measured.js';

interface Gpu {
  /** Dense bf16 products, in TFLOP/s. */
  readonly peak: number;
  /** Bandwidth of memory, in TB/s. */
  readonly bandwidth: number;
  /** In GiB, as a driver reports it. */
  readonly memory: number;
  /** Bandwidth per GPU inside a node, in GB/s. */
  readonly nodeLink: number;
}

/** From the data sheets of the SXM forms. */
export const GPUS = {
  a100: { peak: 312, bandwidth: 2.04, memory: 79, nodeLink: 300 },
  h100: { peak: 989, bandwidth: 3.35, memory: 79, nodeLink: 450 },
  h200: { peak: 989, bandwidth: 4.8, memory: 139, nodeLink: 450 },
  b200: { peak: 2250, bandwidth: 8, memory: 179, nodeLink: 900 },
} as const satisfies Readonly<Record<string, Gpu>>;
export type GpuName = keyof typeof GPUS;
export const GPU_NAMES = Object.keys(GPUS) as GpuName[];

/** The speed of `gpu` from that of an H200. */
export function assumedSpeed(measured: Speed, gpu: GpuName): Speed {
  if (gpu === 'h200') return measured;
  const { peak, bandwidth } = GPUS[gpu];
  return {
    ...measured,
    machine: `${gpu.toUpperCase()} (not measured)`,
    rate: (...given) => (measured.rate(...given) * peak) / GPUS.h200.peak,
    updatePerParameter: (measured.updatePerParameter * GPUS.h200.bandwidth) / bandwidth,
  };
}

/** The assumption in words. */
export function assumption(gpu: GpuName): string {
  const { peak, bandwidth } = GPUS[gpu];
  return (
    `assumed for ${gpu.toUpperCase()}, on which nothing was measured: the share of the peak of the H200 ` +
    `(${peak} of ${GPUS.h200.peak} TFLOP/s), its share of the bandwidth of memory (${bandwidth} of ${GPUS.h200.bandwidth} TB/s), ` +
    'and its time per launch'
  );
}
