/** Timing work on a device: the median of as many runs as fit a budget, and the memory one of them took. */
import type { Device } from '../device/device.js';

/** One run: `run` is timed, what comes before and after it is not. */
export interface Trial {
  run(): void;
  end(): void;
}

/** How long to measure. */
export interface TimeBudget {
  /** Time to spend on the runs of one measurement. */
  readonly ms: number;
  readonly maxRuns: number;
}

export interface Measurement {
  readonly ms: number;
  /** Device memory at its highest, beyond what was held when the run began; kernels' own memory not included. */
  readonly peakBytes: number;
}

/** A device with a clock of its own: milliseconds of each of several runs, launched one after the other. */
interface DeviceClock {
  time(work: () => void, repeats: number): number[];
}

/** Runs that are prepared together on a GPU: each holds its results until all are done. */
const MAX_IN_A_ROW = 8;

/**
 * The first run warms up (kernels are compiled, memory is allocated) and estimates the duration. It counts
 * only if the budget allows no other run.
 */
export function measure(device: Device, start: () => Trial, budget: TimeBudget): Measurement {
  const first = runOnce(device, start());
  const affordable = Math.floor(budget.ms / first.ms);
  if (hasClock(device)) {
    // The first run includes compilation. JavaScript launches slowly until it is compiled too, and in short passes the GPU
    // would wait for it.
    const runs = Math.min(budget.maxRuns, MAX_IN_A_ROW);
    runInARow(device, start, runs);
    return { ms: runInARow(device, start, runs), peakBytes: first.peakBytes };
  }
  // Work far beyond the budget runs once: the warm-up cost is negligible.
  if (first.ms > 4 * budget.ms) return first;
  const runs = Array.from({ length: Math.max(1, Math.min(budget.maxRuns, affordable)) }, () =>
    runOnce(device, start()),
  );
  return { ms: median(runs.map(({ ms }) => ms)), peakBytes: runs[0].peakBytes };
}

function hasClock(device: Device): device is Device & DeviceClock {
  return 'time' in device;
}

/**
 * Launched ahead, so that the GPU never waits for the host: measures kernels without launch latency.
 * The first run does wait, and is left out.
 */
function runInARow(device: Device & DeviceClock, start: () => Trial, count: number): number {
  const trials = Array.from({ length: count + 1 }, start);
  try {
    let next = 0;
    const times = device.time(() => trials[next++].run(), trials.length);
    return median(times.slice(1));
  } finally {
    for (const trial of trials) trial.end();
  }
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

/** Median of the milliseconds that some runs take on the host's clock. */
export function medianTime(run: () => void, runs: number): number {
  return median(
    Array.from({ length: runs }, () => {
      const started = performance.now();
      run();
      return performance.now() - started;
    }),
  );
}
