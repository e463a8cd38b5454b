/** How old a time stamp of the trainer is. Clocks jump, so long-running watchers use their own monotonic clock. */

/** Seconds since `ts`; `key` tells whose time stamp it is. Negative when it lies in the future. */
export type AgeOf = (key: string, ts: number) => number;

/** For a single look there is only the wall clock. */
export function wallAges(now: number = Date.now() / 1000): AgeOf {
  return (_key, ts) => now - ts;
}

/**
 * For a watcher that looks again and again: a time stamp it has seen before is as old as on the first sight plus the steady
 * time since then, and one that is new cannot be older than the last look. So a jump of the wall clock makes nothing stale.
 */
export class SteadyAges {
  readonly #wall: () => number;
  readonly #steady: () => number;
  readonly #seen = new Map<string, { ts: number; ageThen: number; at: number }>();
  #lastLook: number | undefined;

  /** Both in seconds. */
  constructor(wall = () => Date.now() / 1000, steady = () => performance.now() / 1000) {
    this.#wall = wall;
    this.#steady = steady;
  }

  /** The ages of one look. */
  look(): AgeOf {
    const [now, previous] = [this.#steady(), this.#lastLook];
    this.#lastLook = now;
    return (key, ts) => {
      const seen = this.#seen.get(key);
      if (seen?.ts === ts) return seen.ageThen + now - seen.at;
      const wallAge = Math.max(0, this.#wall() - ts);
      const sinceLast = seen === undefined || previous === undefined ? Number.POSITIVE_INFINITY : now - previous;
      const ageThen = Math.min(wallAge, sinceLast);
      this.#seen.set(key, { ts, ageThen, at: now });
      return ageThen;
    };
  }
}
