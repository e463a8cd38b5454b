/**
 * A loader with `lookAhead`: batches can be inspected before `next` returns them, while the device is busy. Its position
 * counts only the batches that `next` has returned, so a checkpoint does not depend on what was inspected.
 */
import { TrefoilError } from '../../errors.js';
import type { Batch } from '../batch.js';
import type { Loader, LoaderTelemetry, SourceProgress } from '../loader.js';

interface Early {
  readonly batch: Batch;
  /** The position before this batch. */
  readonly before: object;
}

export class AheadLoader implements Loader {
  readonly vocabSize: number;
  readonly tokensPerEpoch: number;
  readonly samplesPerEpoch: number;
  readonly telemetry?: () => LoaderTelemetry;
  readonly sources?: () => readonly SourceProgress[];
  readonly firstEnd?: NonNullable<Loader['firstEnd']>;
  readonly fallBack?: (error: TrefoilError) => void;
  readonly #loader: Loader;
  #early: Early[] = [];

  constructor(loader: Loader) {
    this.#loader = loader;
    this.vocabSize = loader.vocabSize;
    this.tokensPerEpoch = loader.tokensPerEpoch;
    this.samplesPerEpoch = loader.samplesPerEpoch;
    if (loader.telemetry) this.telemetry = () => loader.telemetry!();
    if (loader.firstEnd) this.firstEnd = (samples) => loader.firstEnd!(samples);
    if (loader.sources) this.sources = () => loader.sources!(this.state());
    if (loader.fallBack)
      this.fallBack = (error) => {
        loader.fallBack!(error);
        this.#early = [];
      };
  }

  get source(): string | undefined {
    return this.#loader.source;
  }

  get validationSamples(): number {
    return this.#loader.validationSamples;
  }

  /** The next batches, in the order of `next`. Empty if fewer than `batches` are ready. */
  lookAhead(batches: number): readonly Batch[] {
    while (this.#early.length < batches && this.#canTake()) {
      const before = this.#loader.state();
      try {
        this.#early.push({ batch: this.#loader.next(), before });
      } catch (error) {
        // The failing read did not move the position: `next` throws the error when the batch is due.
        if (error instanceof TrefoilError) break;
        throw error;
      }
    }
    return this.#early.length < batches ? [] : this.#early.slice(0, batches).map(({ batch }) => batch);
  }

  next(): Batch {
    return this.#early.shift()?.batch ?? this.#loader.next();
  }

  isReady(batches: number): boolean {
    const more = batches - this.#early.length;
    return more <= 0 || (this.#loader.isReady?.(more) ?? true);
  }

  async ready(batches: number): Promise<void> {
    const more = batches - this.#early.length;
    if (more > 0) await this.#loader.ready?.(more);
  }

  async readyToEvaluate(batches: number): Promise<void> {
    await this.#loader.readyToEvaluate?.(batches);
  }

  state(): object {
    return this.#early[0]?.before ?? this.#loader.state();
  }

  restore(state: unknown): void {
    this.#loader.restore(state);
    this.#early = [];
  }

  get validationSources(): Loader['validationSources'] {
    return this.#loader.validationSources;
  }

  evalBatches(count: number, source?: string): Iterable<Batch> {
    return this.#loader.evalBatches(count, source);
  }

  close(): void {
    this.#loader.close();
  }

  #canTake(): boolean {
    return this.#loader.isReady?.(1) ?? true;
  }
}
