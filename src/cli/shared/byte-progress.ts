/** Progress of copying and downloading weights. */
import { describeProgress } from '../../byte-progress.js';
import { type Io, ProgressLine } from './io.js';

/** A terminal needs no more than a few updates per second. */
const INTERVAL_MS = 100;

export function byteProgress(io: Io) {
  const line = new ProgressLine(io);
  const started = performance.now();
  let last = 0;
  return {
    show: (done: number, total: number): void => {
      if (performance.now() - last < INTERVAL_MS) return;
      last = performance.now();
      line.show(describeProgress(done, total, performance.now() - started));
    },
    /** Removes the line; returns the seconds since the start. */
    end: (): number => {
      line.clear();
      return (performance.now() - started) / 1000;
    },
  };
}
