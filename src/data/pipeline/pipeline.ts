/** The trainer's side of a streamed corpus: grants room to the worker threads, waits for samples, takes them in order. */

import { TrefoilError } from '../../errors.js';
import type { Cursor } from '../sources/documents.js';
import { silentSource } from '../sources/silent.js';
import type { Ring } from './ring.js';
import type { PipelineWorkers } from './workers.js';

export interface TakenSample {
  /** In shared memory. Overwritten once samples beyond the ring's capacity are granted. */
  readonly window: Int32Array;
  /** Start of the lane's next sample. */
  readonly cursor: Cursor;
  readonly epoch: number;
}

/** The rings of a rank's lanes and the threads that fill them. `place` is the number of a lane's ring. */
export class Pipeline {
  readonly #ring: Ring;
  readonly #workers: PipelineWorkers;
  readonly #taken: number[];

  constructor(ring: Ring, workers: PipelineWorkers) {
    this.#ring = ring;
    this.#workers = workers;
    this.#taken = new Array(ring.shape.lanes).fill(0);
  }

  get counts(): { documents: number; bytes: number } {
    return this.#ring.counts;
  }

  taken(place: number): number {
    return this.#taken[place];
  }

  available(place: number): number {
    return this.#ring.produced(place) - this.#taken[place];
  }

  grant(place: number, upTo: number): void {
    if (this.#ring.grant(place, upTo)) this.#workers.wake(this.#ring.workerOf(place));
  }

  grantAtLeast(place: number, upTo: number): void {
    if (this.#ring.granted(place) < upTo) this.grant(place, upTo);
  }

  /** Waits, without blocking the thread, until every lane has the needed number of samples or has ended. */
  async until(needed: ReadonlyMap<number, number>, timeoutSeconds: number): Promise<void> {
    const wanted = this.#taken.map((taken, place) => (needed.has(place) ? taken + needed.get(place)! : 0));
    const isReady = () =>
      wanted.every((count, place) => this.#ring.produced(place) >= count || this.#ring.hasEnded(place));
    const end = performance.now() + 1000 * timeoutSeconds;
    while (!isReady()) {
      const failure = this.#workers.failure();
      if (failure !== undefined) throw failure;
      const left = end - performance.now();
      if (left <= 0) throw silentSource(timeoutSeconds);
      await this.#workers.news(left, () => {
        this.#ring.announceWait(wanted);
        return isReady();
      });
    }
  }

  /** The next sample of a ring. Blocks until it is available. The window is not a copy: see `TakenSample`. */
  take(place: number, timeoutSeconds: number): TakenSample {
    const sample = this.takeUnlessEnded(place, timeoutSeconds);
    if (sample === undefined) throw new TrefoilError('a data lane ended: training data has no end');
    return sample;
  }

  takeUnlessEnded(place: number, timeoutSeconds: number): TakenSample | undefined {
    const end = performance.now() + 1000 * timeoutSeconds;
    this.grantAtLeast(place, this.#taken[place] + 1);
    for (;;) {
      const seen = this.#ring.news;
      if (this.available(place) > 0) break;
      if (this.#ring.hasEnded(place)) return undefined;
      const failure = this.#ring.failed ? this.#workers.failure() : undefined;
      if (failure !== undefined) throw failure;
      const left = end - performance.now();
      if (left <= 0) throw silentSource(timeoutSeconds);
      this.#ring.waitForNews(seen, left);
    }
    const sample = this.#taken[place]++;
    return { window: this.#ring.window(place, sample), ...this.#ring.place(place, sample) };
  }

  close(): void {
    this.#workers.close();
  }
}
