/** The age of the trainer's time stamps, robust against jumps of the wall clock. */

/** Seconds since `ts`; negative for the future. `key` identifies the time stamp between checks. */
export type AgeOf = (key: string, ts: number) => number;

/** Ages by the wall clock, for a single check. */
export function wallAges(now: number = Date.now() / 1000): AgeOf {
  return (_key, ts) => now - ts;
}

/**
 * Ages for repeated checks. A time stamp that was seen before has its age at the first check plus the monotonic time since
 * then; a new one cannot be older than the previous check. A jump of the wall clock therefore makes nothing stale.
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

  /** The ages of one check. */
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
