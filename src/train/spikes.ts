/** Spikes of loss and gradient norm: how many standard deviations a value lies above its running mean. */

export interface SpikeState {
  readonly count: number;
  readonly mean: number;
  readonly variance: number;
}

/** Values before a z-score means anything. */
const WARMUP = 20;
const MEMORY = 0.98;

/** Running mean and variance with exponential forgetting. Its state survives a resume, so a resumed run judges alike. */
export class SpikeDetector {
  #count = 0;
  #mean = 0;
  #variance = 0;

  /** The z-score of a value against what came before; 0 while too little did. */
  score(value: number): number {
    if (this.#count < WARMUP || this.#variance === 0) return 0;
    return (value - this.#mean) / Math.sqrt(this.#variance);
  }

  /** Takes a value into the statistics. Spikes belong in too, or a new level would be a spike for ever. */
  add(value: number): void {
    this.#count += 1;
    const weight = Math.max(1 - MEMORY, 1 / this.#count);
    const difference = value - this.#mean;
    this.#mean += weight * difference;
    this.#variance = (1 - weight) * (this.#variance + weight * difference * difference);
  }

  get state(): SpikeState {
    return { count: this.#count, mean: this.#mean, variance: this.#variance };
  }

  restore(state: SpikeState): void {
    this.#count = state.count;
    this.#mean = state.mean;
    this.#variance = state.variance;
  }
}
