/**
 * Timing with CUDA events. Launches inside a graph happened when it was recorded: `profile` and `timeline` do not see them,
 * `time` does.
 */
import type { DeviceStream } from './stream.js';

/** One launch, in milliseconds from the start of the timeline. */
export interface TimelineEntry {
  readonly name: string;
  /** Whether it ran on another stream than the device's: a collective. */
  readonly isBeside: boolean;
  readonly from: number;
  readonly to: number;
}

interface Mark {
  readonly name: string;
  readonly stream: bigint;
  readonly before: bigint;
  readonly after: bigint;
}

export class CudaClock {
  readonly #stream: DeviceStream;
  /** Null unless a timeline is taken. */
  #marks: Mark[] | null = null;

  constructor(stream: DeviceStream) {
    this.#stream = stream;
  }

  /** GPU time of each of `repeats` runs of `work`, in milliseconds. */
  time(work: () => void, repeats: number): number[] {
    const marks = Array.from({ length: repeats }, () => [this.#event(), this.#event()] as const);
    for (const [before, after] of marks) {
      this.#record(before);
      work();
      this.#record(after);
    }
    this.#stream.synchronize();
    return marks.map(([before, after]) => {
      const milliseconds = this.#between(before, after);
      for (const mark of [before, after]) this.#destroy(mark);
      return milliseconds;
    });
  }

  /** GPU time of the launches of `work`, by name. */
  profile(work: () => void): Map<string, { calls: number; ms: number }> {
    const total = new Map<string, { calls: number; ms: number }>();
    for (const { name, from, to } of this.timeline(work)) {
      const entry = total.get(name) ?? { calls: 0, ms: 0 };
      entry.calls += 1;
      entry.ms += to - from;
      total.set(name, entry);
    }
    return total;
  }

  /** Start and end of each launch of `work`, on all streams. */
  timeline(work: () => void): TimelineEntry[] {
    const start = this.#event();
    this.#record(start);
    this.#marks = [];
    try {
      work();
      this.#stream.synchronize();
      return this.#marks.map(({ name, stream, before, after }) => ({
        name,
        isBeside: stream !== this.#stream.handle,
        from: this.#between(start, before),
        to: this.#between(start, after),
      }));
    } finally {
      for (const { before, after } of this.#marks) for (const mark of [before, after]) this.#destroy(mark);
      this.#destroy(start);
      this.#marks = null;
    }
  }

  /** Runs `launch`, which launches work on `stream`; records events around it while a timeline is taken. */
  marked(name: string | (() => string), stream: bigint, launch: () => void): void {
    const marks = this.#marks;
    if (!marks) {
      launch();
      return;
    }
    const [before, after] = [this.#event(), this.#event()];
    marks.push({ name: typeof name === 'string' ? name : name(), stream, before, after });
    this.#record(before, stream);
    launch();
    this.#record(after, stream);
  }

  #event(): bigint {
    return this.#stream.driver.get('cuEventCreate', 0);
  }

  #record(event: bigint, stream = this.#stream.handle): void {
    this.#stream.driver.call('cuEventRecord', event, stream);
  }

  #between(from: bigint, to: bigint): number {
    return this.#stream.driver.getFloat('cuEventElapsedTime', from, to);
  }

  #destroy(event: bigint): void {
    this.#stream.driver.call('cuEventDestroy_v2', event);
  }
}
