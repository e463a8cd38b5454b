/** How long fetching batches took: the last time, and percentiles over the recent past. */
const KEPT = 256;

export class FetchTimes {
  readonly #recent: number[] = [];
  #last = 0;

  add(seconds: number): void {
    this.#last = seconds;
    this.#recent.push(seconds);
    if (this.#recent.length > KEPT) this.#recent.shift();
  }

  get lastSeconds(): number {
    return this.#last;
  }

  /** The time in milliseconds that the given share of fetches stayed within. */
  percentileMs(share: number): number {
    if (this.#recent.length === 0) return 0;
    const sorted = [...this.#recent].sort((a, b) => a - b);
    return 1000 * sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
  }
}
