/** Timing work on a device: the median of as many runs as fit a budget, and the memory one of them took. */
import type { Device } from '../device/device.js';

/** One run: `run` is timed, what comes before and after it is not. */
export interface Trial {
  run(): void;
  end(): void;
}

export interface Budget {
  /** Time to spend on the runs of one measurement. */
  readonly ms: number;
  readonly mostRuns: number;
}

export interface Measurement {
  readonly ms: number;
  /** Device memory at its highest, beyond what was held when the run began; kernels' own memory not included. */
  readonly peakBytes: number;
}

/**
 * The first run warms up (kernels are compiled, memory is taken from the system) and says how long one takes. It counts
 * only where the budget leaves no room for another.
 */
export function measure(device: Device, start: () => Trial, budget: Budget): Measurement {
  const first = runOnce(device, start());
  const affordable = Math.floor(budget.ms / first.ms);
  // Work far beyond the budget runs once: what warming up costs is lost in it.
  if (first.ms > 4 * budget.ms) return first;
  const runs = Array.from({ length: Math.max(1, Math.min(budget.mostRuns, affordable)) }, () =>
    runOnce(device, start()),
  );
  return { ms: median(runs.map(({ ms }) => ms)), peakBytes: runs[0].peakBytes };
}

function runOnce(device: Device, trial: Trial): Measurement {
  const { pool } = device;
  try {
    device.synchronize();
    pool.resetPeak();
    const held = pool.bytesInUse;
    const started = performance.now();
    trial.run();
    device.synchronize();
    return { ms: performance.now() - started, peakBytes: pool.peakBytesInUse - held };
  } finally {
    trial.end();
  }
}

export function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = Math.floor(sorted.length / 2);
  return sorted.length % 2 === 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
