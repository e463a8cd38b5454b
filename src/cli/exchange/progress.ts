/** Progress of copying weights. */
import { type Io, ProgressLine } from '../shared/io.js';

const BAR = 24;
/** A terminal needs no more than a few updates per second. */
const INTERVAL_MS = 100;

export function byteProgress(io: Io) {
  const line = new ProgressLine(io);
  const started = performance.now();
  let last = 0;
  const seconds = () => (performance.now() - started) / 1000;
  return {
    show: (done: number, total: number): void => {
      if (performance.now() - last < INTERVAL_MS) return;
      last = performance.now();
      const filled = Math.round((BAR * done) / Math.max(1, total));
      const speed = done / 1e6 / Math.max(1e-3, seconds());
      line.show(
        `[${'#'.repeat(filled)}${'.'.repeat(BAR - filled)}] ${(done / 1e6).toFixed(0)} of ${(total / 1e6).toFixed(0)} MB, ` +
          `${speed.toFixed(0)} MB/s`,
      );
    },
    /** Removes the line; returns the seconds since the start. */
    end: (): number => {
      line.clear();
      return seconds();
    },
  };
}
