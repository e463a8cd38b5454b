/**
 * Batches for training and evaluation, from any source.
 *
 * The order of samples is one sequence for the whole run. A call of `next()` on all W ranks takes the next B * W of
 * it, rank r the rows r*B … r*B+B-1 of those. Gradient accumulation is several calls. So a global batch of
 * B * W * accumulation sequences is a stretch of the sequence that does not depend on W, and the position is one number.
 */

import { z } from 'zod';
import { TrefoilError, UsageError } from '../errors.js';
import { type Batch, packBatch } from './batch.js';
import { type OpenSource, type OpenSourceOptions, openSource, type SourceOptions } from './source.js';
import type { Samples } from './stream.js';

/** Options of `createLoader`. */
export interface LoaderOptions extends SourceOptions, OpenSourceOptions {
  /** Default 0 of 1. */
  rank?: number | undefined;
  world?: number | undefined;
}

export const LoaderState = z.strictObject({
  version: z.literal(1),
  /** Number of the next sample in the order of the run, over all ranks. */
  sample: z.number().int().min(0).max(Number.MAX_SAFE_INTEGER),
  epoch: z.number().int().min(0),
  dataset: z.string(),
  seed: z.number(),
  seq_len: z.number(),
  val_fraction: z.number(),
  shuffle: z.boolean(),
});
/** A JSON value that says exactly where the run stands in its data. The same on every rank. */
export type LoaderState = z.infer<typeof LoaderState>;

/** What a loader that reads ahead tells about itself. */
export interface LoaderTelemetry {
  /** Documents read since the start of the process, and their bytes of text. */
  readonly documents: number;
  readonly bytes: number;
  /** Batches that wait ready. */
  readonly queueFill: number;
}

/** A source of training and validation batches with an exact position. */
export interface Loader {
  readonly vocabSize: number;
  /** Training tokens; Infinity for synthetic data, as is samplesPerEpoch. */
  readonly tokensPerEpoch: number;
  readonly samplesPerEpoch: number;
  /** Whole samples set aside for validation. */
  readonly validationSamples: number;
  next(): Batch;
  /** Of loaders that read ahead: waits until `batches` can be taken at once. Rejects when the source is dead. */
  ready?(batches: number): Promise<void>;
  /** Of the same loaders: whether that is so now. */
  isReady?(batches: number): boolean;
  /** The next batches before their turn, while there is time; none when they would have to be waited for. */
  lookAhead?(batches: number): readonly Batch[];
  /** As `ready`, for `evalBatches(batches)`. */
  readyToEvaluate?(batches: number): Promise<void>;
  telemetry?(): LoaderTelemetry;
  /** A JSON value; what `restore` takes. */
  state(): object;
  /** Continues exactly behind the last batch of the run that gave this state. Takes no time, wherever that is. */
  restore(state: unknown): void;
  /**
   * At most `count` batches of validation samples for this rank, the same at every call: all there are, or as many as
   * fit, spread evenly. Every rank gets the same number of batches of the same shape; rows without a sample have only
   * ignored targets, so weigh each batch by its targetCount.
   */
  evalBatches(count: number): Iterable<Batch>;
  close(): void;
}

/** A loader of samples that are known by number: its position is one number too. */
export interface NumberedLoader extends Loader {
  state(): LoaderState;
}

/** Opens a source of batches whose order depends on the seed alone. */
export async function createLoader(options: LoaderOptions): Promise<NumberedLoader> {
  checkOptions(options);
  return new SourceLoader(options, await openSource(options, options));
}

class SourceLoader implements NumberedLoader {
  readonly vocabSize: number;
  readonly tokensPerEpoch: number;
  readonly samplesPerEpoch: number;
  readonly validationSamples: number;
  readonly #options: LoaderOptions;
  readonly #source: OpenSource;
  readonly #rank: number;
  readonly #world: number;
  #sample = 0;
  #closed = false;

  constructor(options: LoaderOptions, source: OpenSource) {
    this.#options = options;
    this.#source = source;
    this.#rank = options.rank ?? 0;
    this.#world = options.world ?? 1;
    this.vocabSize = source.vocabSize;
    this.tokensPerEpoch = source.tokensPerEpoch;
    this.samplesPerEpoch = source.train.perEpoch;
    this.validationSamples = source.validationSamples;
  }

  next(): Batch {
    if (this.#closed) throw new TrefoilError('the data loader is closed');
    const { train } = this.#source;
    const rows = this.#options.batch_size;
    const first = this.#sample + this.#rank * rows;
    const addresses = Array.from({ length: rows }, (_, row) => train.locate(first + row));
    const batch = packBatch(train, addresses, this.#packing());
    this.#sample += rows * this.#world;
    return batch;
  }

  state(): LoaderState {
    return {
      version: 1,
      sample: this.#sample,
      epoch: Math.floor(this.#sample / this.samplesPerEpoch),
      dataset: this.#source.identity,
      ...this.#settings(),
    };
  }

  restore(value: unknown): void {
    const result = LoaderState.safeParse(value);
    if (!result.success) {
      const issue = result.error.issues[0];
      throw new UsageError(`checkpoint: data position: ${issue.path.join('.') || 'value'}: ${issue.message}`);
    }
    const state = result.data;
    if (state.dataset !== this.#source.identity) {
      const where = this.#options.path ?? this.#options.source;
      throw new UsageError(
        `data.path: ${where} holds other data than this run was trained on (${this.#source.identity.slice(0, 12)}, ` +
          `not ${state.dataset.slice(0, 12)}); use the same data or start a new run from the weights`,
      );
    }
    for (const [key, now] of Object.entries(this.#settings())) {
      const before = state[key as keyof LoaderState];
      if (before === now) continue;
      throw new UsageError(
        `${key} is ${now}, but was ${before} when this run was saved, which gives another order of the data; ` +
          'set it back or start a new run from the weights',
      );
    }
    this.#sample = state.sample;
  }

  evalBatches(count: number): Iterable<Batch> {
    const { validation, validationSamples } = this.#source;
    if (validation === undefined) {
      throw new UsageError('data.val_fraction is 0: there is nothing to evaluate on; set it above 0');
    }
    return this.#evaluate(validation, validationSamples, count);
  }

  *#evaluate(validation: Samples, available: number, count: number): Generator<Batch> {
    const rows = this.#options.batch_size;
    const perStep = rows * this.#world;
    const used = Math.min(count * perStep, available);
    const isSpread = this.#options.evaluate !== 'all' && Number.isFinite(available);
    const spacing = isSpread ? available / used : 1;
    for (let start = 0; start < used; start += perStep) {
      if (this.#closed) throw new TrefoilError('the data loader is closed');
      const first = start + this.#rank * rows;
      const counted = Math.max(0, Math.min(rows, used - first));
      // Filling rows repeat the last sample.
      const addresses = Array.from({ length: rows }, (_, row) =>
        validation.locate(Math.floor(Math.min(first + row, used - 1) * spacing)),
      );
      yield packBatch(validation, addresses, this.#packing(), counted);
    }
  }

  close(): void {
    if (!this.#closed) this.#source.close();
    this.#closed = true;
  }

  #packing(): { sequenceLength: number; documentMask: boolean } {
    return {
      sequenceLength: this.#options.seq_len,
      documentMask: this.#source.documentMask ?? this.#options.document_mask ?? false,
    };
  }

  /** Everything besides the tokens that decides what sample i is. */
  #settings(): { seed: number; seq_len: number; val_fraction: number; shuffle: boolean } {
    const { seed, seq_len, val_fraction, shuffle = true } = this.#options;
    return { seed, seq_len, val_fraction, shuffle };
  }
}

/** The config schema checks these too; a program that calls this module has none. */
function checkOptions(options: LoaderOptions): void {
  const { rank = 0, world = 1 } = options;
  const whole = (name: string, value: number, least: number, most = 2 ** 31 - 1): void => {
    if (Number.isInteger(value) && value >= least && value <= most) return;
    throw new UsageError(`${name}: ${value} is not a whole number from ${least} to ${most}`);
  };
  whole('train.seq_len', options.seq_len, 1);
  whole('train.batch_size', options.batch_size, 1);
  whole('train.seed', options.seed, 0, Number.MAX_SAFE_INTEGER);
  whole('world', world, 1);
  whole('rank', rank, 0, world - 1);
  if (options.vocab_size !== undefined) whole('vocab_size', options.vocab_size, 1);
  if (!(options.val_fraction >= 0 && options.val_fraction < 1)) {
    throw new UsageError(`data.val_fraction: ${options.val_fraction} is not at least 0 and below 1`);
  }
}
