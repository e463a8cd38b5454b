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
import type { NumberedSource } from './generated-source.js';
import { type LoaderState, readLoaderState, type SampleSettings } from './position.js';

export class NumberedLoader implements Loader {
  readonly vocabSize: number;
  readonly source: string;
  readonly tokensPerEpoch: number;
  readonly samplesPerEpoch: number;
  readonly validationSamples: number;
  readonly validationSources: Loader['validationSources'];
  readonly sources?: NonNullable<Loader['sources']>;
  readonly firstEnd?: NonNullable<Loader['firstEnd']>;
  readonly #config: Config;
  readonly #source: NumberedSource;
  readonly #rank: number;
  readonly #world: number;
  readonly #packing: Packing;
  readonly #isWhole: boolean;
  #sample = 0;
  #closed = false;

  constructor(config: Config, { rank = 0, world = 1, evaluate }: OpenOptions, source: NumberedSource) {
    this.#config = config;
    this.#source = source;
    this.#rank = rank;
    this.#world = world;
    this.#packing = this.#packingOf(source);
    this.#isWhole = evaluate === 'all';
    this.vocabSize = source.vocabSize;
    this.source = config.data.source;
    this.tokensPerEpoch = source.tokensPerEpoch;
    this.samplesPerEpoch = source.train.perEpoch;
    this.validationSamples = source.validationSamples;
    const { mixture } = source;
    if (mixture === undefined) return;
    this.validationSources = mixture.parts
      .filter((part) => part.source.validationSamples > 0)
      .map(({ spec: { name, weight }, source: { validationSamples: samples } }) => ({ name, weight, samples }));
    this.sources = (position = this.state()) => mixture.progress((position as LoaderState).sample);
    this.firstEnd = (samples) => {
      const end = mixture.firstEnd(this.#sample + samples);
      return end && { name: end.name, after: end.sample - this.#sample };
    };
  }

  next(): Batch {
    if (this.#closed) throw new TrefoilError('the data loader is closed');
    const { train, mixture } = this.#source;
    const rows = this.#config.train.batch_size;
    const end = this.#sample + rows * this.#world;
    // All ranks see the end of a source at the same batch, whichever of them would have read past it.
    mixture?.expect(end);
    const first = this.#sample + this.#rank * rows;
    const addresses = Array.from({ length: rows }, (_, row) => train.locate(first + row));
    const batch = packBatch(train, addresses, this.#packing);
    this.#sample = end;
    return batch;
  }

  state(): LoaderState {
    const { mixture } = this.#source;
    return {
      version: 1,
      sample: this.#sample,
      epoch: Math.floor(this.#sample / this.samplesPerEpoch),
      dataset: this.#source.identity,
      ...this.#settings(),
      ...(mixture && { sources: mixture.state(this.#sample) }),
    };
  }

  restore(value: unknown): void {
    const { path, source } = this.#config.data;
    const { identity, mixture } = this.#source;
    const expected = { dataset: identity, place: path ?? source, settings: this.#settings() };
    const { sample, sources = [] } = readLoaderState(value, expected);
    mixture?.restore(sources, sample);
    this.#sample = sample;
  }

  evalBatches(count: number, name?: string): Iterable<Batch> {
    const { mixture } = this.#source;
    const sources = mixture
      ? mixture.parts.filter(({ spec }) => name === undefined || spec.name === name).map(({ source }) => source)
      : [this.#source];
    const held = sources.filter(({ validation }) => validation !== undefined);
    if (held.length === 0) {
      throw new UsageError('data.val_fraction is 0: there is nothing to evaluate on; set it above 0');
    }
    return this.#evaluateAll(held, count);
  }

  *#evaluateAll(sources: readonly NumberedSource[], count: number): Generator<Batch> {
    for (const source of sources) yield* this.#evaluate(source, count);
  }

  *#evaluate(source: NumberedSource, count: number): Generator<Batch> {
    const { validationSamples: available } = source;
    const validation = source.validation as Samples;
    const packing = this.#packingOf(source);
    const rows = this.#config.train.batch_size;
    const perStep = rows * this.#world;
    const used = Math.min(count * perStep, available);
    const spacing = this.#isWhole || !Number.isFinite(available) ? 1 : available / used;
    for (let start = 0; start < used; start += perStep) {
      if (this.#closed) throw new TrefoilError('the data loader is closed');
      const first = start + this.#rank * rows;
      const counted = Math.max(0, Math.min(rows, used - first));
      // Rows without a sample repeat the last one.
      const addresses = Array.from({ length: rows }, (_, row) =>
        validation.locate(Math.floor(Math.min(first + row, used - 1) * spacing)),
      );
      yield packBatch(validation, addresses, packing, counted);
    }
  }

  close(): void {
    if (!this.#closed) this.#source.close();
    this.#closed = true;
  }

  #packingOf({ documentMask = this.#config.data.document_mask }: NumberedSource): Packing {
    return { sequenceLength: this.#config.train.seq_len, documentMask };
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
