/**
 * Batches of samples that are known by number: from shards, or generated.
 *
 * The order of samples is one sequence for the whole run. A call of `next()` on all W ranks takes the next B * W of it,
 * rank r the rows r*B … r*B+B-1 of those. Gradient accumulation is several calls. So a global batch of
 * B * W * accumulation sequences is a stretch of the sequence that does not depend on W, and the position is one number.
 */

import type { Config } from '../../config/schema.js';
import { TrefoilError, UsageError } from '../../errors.js';
import { type Batch, type Packing, packBatch, type Samples } from '../batch.js';
import type { Loader, OpenOptions } from '../loader.js';
import type { NumberedSource } from './numbered-source.js';
import { type LoaderState, readLoaderState, type SampleSettings } from './position.js';

export class NumberedLoader implements Loader {
  readonly vocabSize: number;
  readonly source: string;
  readonly tokensPerEpoch: number;
  readonly samplesPerEpoch: number;
  readonly validationSamples: number;
  readonly #config: Config;
  readonly #source: NumberedSource;
  readonly #rank: number;
  readonly #world: number;
  readonly #packing: Packing;
  readonly #isSpread: boolean;
  #sample = 0;
  #closed = false;

  constructor(config: Config, { rank = 0, world = 1, evaluate }: OpenOptions, source: NumberedSource) {
    this.#config = config;
    this.#source = source;
    this.#rank = rank;
    this.#world = world;
    const documentMask = source.documentMask ?? config.data.document_mask;
    this.#packing = { sequenceLength: config.train.seq_len, documentMask };
    this.#isSpread = evaluate !== 'all' && Number.isFinite(source.validationSamples);
    this.vocabSize = source.vocabSize;
    this.source = config.data.source;
    this.tokensPerEpoch = source.tokensPerEpoch;
    this.samplesPerEpoch = source.train.perEpoch;
    this.validationSamples = source.validationSamples;
  }

  next(): Batch {
    if (this.#closed) throw new TrefoilError('the data loader is closed');
    const { train } = this.#source;
    const rows = this.#config.train.batch_size;
    const first = this.#sample + this.#rank * rows;
    const addresses = Array.from({ length: rows }, (_, row) => train.locate(first + row));
    const batch = packBatch(train, addresses, this.#packing);
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
    const { path, source } = this.#config.data;
    const place = path ?? source;
    const expected = { dataset: this.#source.identity, place, settings: this.#settings() };
    this.#sample = readLoaderState(value, expected).sample;
  }

  evalBatches(count: number): Iterable<Batch> {
    const { validation, validationSamples } = this.#source;
    if (validation === undefined) {
      throw new UsageError('data.val_fraction is 0: there is nothing to evaluate on; set it above 0');
    }
    return this.#evaluate(validation, validationSamples, count);
  }

  *#evaluate(validation: Samples, available: number, count: number): Generator<Batch> {
    const rows = this.#config.train.batch_size;
    const perStep = rows * this.#world;
    const used = Math.min(count * perStep, available);
    const spacing = this.#isSpread ? available / used : 1;
    for (let start = 0; start < used; start += perStep) {
      if (this.#closed) throw new TrefoilError('the data loader is closed');
      const first = start + this.#rank * rows;
      const counted = Math.max(0, Math.min(rows, used - first));
      // Rows without a sample repeat the last one.
      const addresses = Array.from({ length: rows }, (_, row) =>
        validation.locate(Math.floor(Math.min(first + row, used - 1) * spacing)),
      );
      yield packBatch(validation, addresses, this.#packing, counted);
    }
  }

  close(): void {
    if (!this.#closed) this.#source.close();
    this.#closed = true;
  }

  /** Everything besides the tokens that determines sample number i. */
  #settings(): SampleSettings {
    const { data, train } = this.#config;
    const { shuffle } = data;
    const val_fraction = data.val_path === null ? data.val_fraction : 0;
    const split = val_fraction > 0 ? { split_seed: data.split_seed } : {};
    return { seed: data.seed ?? train.seed, seq_len: train.seq_len, val_fraction, ...split, shuffle };
  }
}
