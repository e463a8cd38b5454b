/** A loader that switches to synthetic tokens when its source fails (--synthetic-on-fail). */
import type { Batch } from '../data/batch.js';
import type { Loader, LoaderTelemetry } from '../data/loader.js';
import { TrefoilError } from '../errors.js';

/**
 * The position is always that of the real source, so a run that is resumed later continues where real data ended.
 */
export class FallbackLoader implements Loader {
  readonly vocabSize: number;
  readonly tokensPerEpoch: number;
  readonly samplesPerEpoch: number;
  readonly #real: Loader;
  readonly #standIn: Loader;
  readonly #onReplaced: (error: TrefoilError) => void;
  #replaced = false;

  constructor(real: Loader, standIn: Loader, onReplaced: (error: TrefoilError) => void) {
    this.#real = real;
    this.#standIn = standIn;
    this.#onReplaced = onReplaced;
    this.vocabSize = real.vocabSize;
    this.tokensPerEpoch = real.tokensPerEpoch;
    this.samplesPerEpoch = real.samplesPerEpoch;
  }

  /** Whether batches are synthetic now. */
  get replaced(): boolean {
    return this.#replaced;
  }

  /** 0 while the source is replaced: a loss on random tokens would look like a measurement. */
  get validationSamples(): number {
    return this.#replaced ? 0 : this.#real.validationSamples;
  }

  async ready(batches: number): Promise<void> {
    if (this.#replaced) return;
    try {
      await this.#real.ready?.(batches);
    } catch (error) {
      this.#replace(error);
    }
  }

  isReady(batches: number): boolean {
    return this.#replaced || (this.#real.isReady?.(batches) ?? true);
  }

  async readyToEvaluate(batches: number): Promise<void> {
    await this.#real.readyToEvaluate?.(batches);
  }

  next(): Batch {
    if (!this.#replaced) {
      try {
        return this.#real.next();
      } catch (error) {
        this.#replace(error);
      }
    }
    return this.#standIn.next();
  }

  telemetry(): LoaderTelemetry {
    return this.#real.telemetry?.() ?? { documents: 0, bytes: 0, queueFill: 0 };
  }

  state(): object {
    return this.#real.state();
  }

  restore(state: unknown): void {
    this.#real.restore(state);
  }

  evalBatches(count: number): Iterable<Batch> {
    return this.#real.evalBatches(count);
  }

  close(): void {
    this.#real.close();
    this.#standIn.close();
  }

  #replace(error: unknown): void {
    if (!(error instanceof TrefoilError)) throw error;
    this.#replaced = true;
    this.#onReplaced(error);
  }
}
