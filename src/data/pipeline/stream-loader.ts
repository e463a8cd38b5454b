/**
 * Batches of a streamed corpus. Worker threads fill rings of samples ahead of the trainer; `next` takes what is there,
 * `ready` waits for it without blocking the thread, so that signals are heard.
 *
 * Sample k of the run is the next one of lane k mod L (sources/order.ts). A call of `next` on all W ranks takes the samples
 * [n, n + B * W); rank r takes those with k mod W = r, and reads only the lanes they come from. The position is the number
 * n and one cursor per lane: every rank has those of its own lanes, and `mergeStreamStates` joins them for a checkpoint.
 */

import { TrefoilError, UsageError } from '../../errors.js';
import { greatestCommonDivisor } from '../../numbers.js';
import { type Batch, IGNORED_TARGET, packBatch, type SampleAddress, type Samples } from '../batch.js';
import type { Loader, LoaderTelemetry } from '../loader.js';
import { type Cursor, START } from '../sources/documents.js';
import { corpusIdentity } from '../sources/order.js';
import type { CorpusSpec } from '../sources/spec.js';
import { checkVocabulary, createTokenizer } from '../tokenizer.js';
import { DOCUMENT_START, NO_TOKEN, TOKEN_MASK } from './lane-samples.js';
import type { LaneTask, StreamTask } from './messages.js';
import { Pipeline } from './pipeline.js';
import { readStreamState, type SampleSettings, type StreamState } from './position.js';
import { createRing, Ring } from './ring.js';
import { PipelineWorkers } from './workers.js';

export interface StreamLoaderOptions {
  readonly spec: CorpusSpec;
  readonly tokenizer: string;
  readonly sequenceLength: number;
  readonly batchSize: number;
  readonly documentMask?: boolean | undefined;
  /** The model's vocabulary, an upper bound for the tokenizer's. */
  readonly vocabulary?: number | undefined;
  readonly workers: number;
  /** Documents that are tokenised between two turns of the event loop. */
  readonly documentBatch: number;
  /** Read `queue` batches ahead of the trainer. If false, a batch is produced when it is requested. */
  readonly prefetch: boolean;
  readonly queue: number;
  /** Seconds after which a missing batch is an error. */
  readonly timeout: number;
  /** The part that `evalBatches` covers: the validation part (default), or the whole source, every target once. */
  readonly evaluate?: 'validation' | 'all' | undefined;
  /** Default 0 of 1. */
  readonly rank?: number | undefined;
  readonly world?: number | undefined;
  /** Called after a batch, when at least `every` documents were read since the last call. */
  readonly report?: { readonly every: number; readonly say: (documents: number, bytes: number) => void } | undefined;
}

export class StreamLoader implements Loader {
  readonly vocabSize: number;
  readonly tokensPerEpoch = Number.POSITIVE_INFINITY;
  readonly samplesPerEpoch = Number.POSITIVE_INFINITY;
  readonly #options: StreamLoaderOptions;
  readonly #identity: string;
  readonly #rank: number;
  readonly #world: number;
  /** Lanes that this rank reads, ascending. The index of a lane here is the number of its ring. */
  readonly #lanes: readonly number[];
  readonly #workerCount: number;
  #sample = 0;
  #epoch = 0;
  #cursors: (Cursor | null)[];
  #pipeline: Pipeline | undefined;
  readonly #validation: Int32Array[] = [];
  #validationEnded = false;
  #reported = 0;
  #closed = false;

  /** Reads nothing yet: `ready` starts the workers. */
  constructor(options: StreamLoaderOptions) {
    const tokenizer = createTokenizer(options.tokenizer);
    checkVocabulary(options.tokenizer, tokenizer, options.vocabulary);
    this.#options = options;
    this.vocabSize = options.vocabulary ?? tokenizer.vocabSize;
    this.#identity = corpusIdentity(options.spec, tokenizer.identity);
    this.#rank = options.rank ?? 0;
    this.#world = options.world ?? 1;
    const { lanes } = options.spec;
    const shared = greatestCommonDivisor(lanes, this.#world);
    this.#lanes = Array.from({ length: lanes }, (_, lane) => lane).filter(
      (lane) => lane % shared === this.#rank % shared,
    );
    this.#workerCount = Math.min(options.workers, this.#lanes.length);
    this.#cursors = Array.from({ length: lanes }, (_, lane) => (this.#lanes.includes(lane) ? START : null));
  }

  /**
   * Batches that are kept ready: at least `queue`, and two samples of every lane, so that a lane opens its file well before
   * its turn. With small batches the lanes decide.
   */
  get batchesAhead(): number {
    const { batchSize, prefetch, spec } = this.#options;
    return prefetch ? Math.floor((this.#slots() * spec.lanes) / (batchSize * this.#world)) : 0;
  }

  get validationSamples(): number {
    if (!this.#evaluates) return 0;
    return this.#validationEnded ? this.#validation.length : Number.POSITIVE_INFINITY;
  }

  /** Starts the workers at the current position. `ready` calls it. */
  async start(): Promise<void> {
    if (this.#closed) throw new TrefoilError('the data loader is closed');
    if (this.#pipeline !== undefined) return;
    const { spec, sequenceLength, documentBatch, tokenizer, prefetch } = this.#options;
    const validationRing = this.#lanes.length;
    const ring = createRing({
      lanes: this.#lanes.length + 1,
      slots: this.#slots(),
      sequenceLength,
      workers: this.#workerCount,
    });
    const lanes: LaneTask[] = this.#lanes.map((lane, place) => ({
      lane,
      ring: place,
      side: 'train',
      cursor: this.#cursors[lane]!,
    }));
    // Validation documents are read on demand only, by a thread that also serves training lanes.
    lanes.push({
      lane: 0,
      ring: validationRing,
      side: this.#options.evaluate === 'all' ? 'once' : 'validation',
      cursor: START,
    });
    const tasks = Array.from(
      { length: this.#workerCount },
      (_, worker): Omit<StreamTask, 'port'> => ({
        kind: 'stream',
        worker,
        spec,
        ring,
        tokenizer,
        documentBatch,
        fetchAhead: prefetch,
        lanes: lanes.filter((task) => task.ring % this.#workerCount === worker),
      }),
    );
    this.#pipeline = new Pipeline(new Ring(ring), await PipelineWorkers.start(tasks));
    if (prefetch) for (const place of this.#lanes.keys()) this.#pipeline.grant(place, this.#slots());
  }

  /** Resolves when `batches`, but at most as many as the queue holds, can be taken without waiting. */
  async ready(batches: number): Promise<void> {
    await this.start();
    const pipeline = this.#pipeline!;
    const most = this.#options.prefetch ? Math.min(batches, this.#options.queue) : 1;
    const needed = this.#needed(most);
    for (const [place, count] of needed) pipeline.grantAtLeast(place, pipeline.taken(place) + count);
    await pipeline.until(needed, this.#options.timeout);
  }

  isReady(batches: number): boolean {
    const pipeline = this.#pipeline;
    if (pipeline === undefined) return false;
    return [...this.#needed(batches)].every(([place, count]) => pipeline.available(place) >= count);
  }

  next(): Batch {
    const pipeline = this.#running();
    const { batchSize: rows, sequenceLength, documentMask = false } = this.#options;
    const { lanes } = this.#options.spec;
    const addresses: SampleAddress[] = [];
    const windows: Int32Array[] = [];
    // Applied when the batch is complete: after an error the position is still that before the batch.
    const moved = new Map<number, Cursor>();
    const first = this.#sample;
    for (let sample = first; sample < first + rows * this.#world; sample++) {
      const place = this.#lanes.indexOf(sample % lanes);
      if (place < 0) continue;
      const { window, cursor, epoch } = pipeline.take(place, this.#options.timeout);
      moved.set(sample % lanes, cursor);
      this.#epoch = Math.max(this.#epoch, epoch);
      // Ranks share lanes if their number does not divide that of the lanes: samples of other ranks are skipped.
      if (sample % this.#world !== this.#rank) continue;
      addresses.push({ id: sample, epoch, position: windows.length });
      windows.push(window);
    }
    const batch = packBatch(windowSamples(windows), addresses, { sequenceLength, documentMask });
    for (const [lane, cursor] of moved) this.#cursors[lane] = cursor;
    // After packing: a grant lets the worker overwrite the slots.
    if (this.#options.prefetch)
      for (const lane of moved.keys()) {
        const place = this.#lanes.indexOf(lane);
        pipeline.grant(place, pipeline.taken(place) + this.#slots());
      }
    this.#sample += rows * this.#world;
    this.#report(pipeline);
    return batch;
  }

  telemetry(): LoaderTelemetry {
    const pipeline = this.#pipeline;
    if (pipeline === undefined) return { documents: 0, bytes: 0, queueFill: 0 };
    const { lanes, batchSize } = { ...this.#options.spec, ...this.#options };
    const perBatch = batchSize * (this.#lanes.length / lanes) * this.#world;
    const waiting = [...this.#lanes.keys()].reduce((sum, place) => sum + pipeline.available(place), 0);
    return { ...pipeline.counts, queueFill: waiting / perBatch };
  }

  state(): StreamState {
    return {
      version: 1,
      kind: 'stream',
      sample: this.#sample,
      epoch: this.#epoch,
      dataset: this.#identity,
      ...this.#settings(),
      lanes: [...this.#cursors],
    };
  }

  restore(value: unknown): void {
    const place = this.#options.spec.files[0].name;
    const state = readStreamState(value, { dataset: this.#identity, place, settings: this.#settings() });
    const missing = this.#lanes.filter((lane) => state.lanes[lane] == null);
    if (missing.length > 0)
      throw new UsageError(
        `checkpoint: data position: lanes ${missing.join(', ')} are missing: not all ranks were saved`,
      );
    this.#pipeline?.close();
    this.#pipeline = undefined;
    // The new pipeline reads validation from its start.
    this.#validation.length = 0;
    this.#validationEnded = false;
    this.#sample = state.sample;
    this.#epoch = state.epoch;
    this.#cursors = state.lanes.map((cursor, lane) => (this.#lanes.includes(lane) ? cursor : null));
  }

  async readyToEvaluate(batches: number): Promise<void> {
    if (!this.#evaluates) return;
    await this.start();
    const pipeline = this.#pipeline!;
    const place = this.#lanes.length;
    const samples = batches * this.#options.batchSize * this.#world;
    while (this.#validation.length < samples && !this.#validationEnded) {
      this.#grantValidation(pipeline, samples);
      await pipeline.until(new Map([[place, 1]]), this.#options.timeout);
      this.#takeValidation(pipeline);
    }
  }

  /** Validation samples are read at the first call and kept. Blocks, unless `readyToEvaluate` was awaited before. */
  *evalBatches(count: number): Generator<Batch> {
    if (!this.#evaluates)
      throw new UsageError('data.val_fraction is 0: there is nothing to evaluate on; set it above 0');
    const { batchSize: rows, sequenceLength, documentMask = false } = this.#options;
    const perStep = rows * this.#world;
    const kept = this.#readValidation(count * perStep);
    const used = Math.min(kept.length, count * perStep);
    if (used === 0)
      throw new UsageError('data.val_fraction: sets too few documents aside for one sample; raise it, or set it to 0');
    for (let start = 0; start < used; start += perStep) {
      const first = start + this.#rank * rows;
      const counted = Math.max(0, Math.min(rows, used - first));
      // Rows without a sample repeat the last one.
      const addresses = Array.from({ length: rows }, (_, row) => {
        const id = Math.min(first + row, used - 1);
        return { id, epoch: 0, position: id };
      });
      yield packBatch(windowSamples(kept), addresses, { sequenceLength, documentMask }, counted);
    }
  }

  close(): void {
    this.#closed = true;
    this.#pipeline?.close();
    this.#pipeline = undefined;
  }

  get #evaluates(): boolean {
    return this.#options.evaluate === 'all' || this.#options.spec.valFraction > 0;
  }

  #running(): Pipeline {
    if (this.#closed) throw new TrefoilError('the data loader is closed');
    if (this.#pipeline === undefined) throw new TrefoilError('the data loader is not started: await ready() first');
    return this.#pipeline;
  }

  #readValidation(samples: number): readonly Int32Array[] {
    const pipeline = this.#running();
    while (this.#validation.length < samples && !this.#validationEnded) {
      this.#grantValidation(pipeline, samples);
      this.#takeValidation(pipeline);
    }
    return this.#validation;
  }

  #grantValidation(pipeline: Pipeline, samples: number): void {
    const place = this.#lanes.length;
    const most = Math.min(this.#slots(), samples - this.#validation.length);
    pipeline.grantAtLeast(place, pipeline.taken(place) + most);
  }

  #takeValidation(pipeline: Pipeline): void {
    const sample = pipeline.takeUnlessEnded(this.#lanes.length, this.#options.timeout);
    if (sample === undefined) this.#validationEnded = true;
    else this.#validation.push(sample.window.slice());
  }

  /** Slots per ring, so that all rings together hold the queue. */
  #slots(): number {
    const { batchSize, queue, prefetch, spec } = this.#options;
    const perBatch = Math.ceil((batchSize * this.#world) / spec.lanes);
    return prefetch ? Math.ceil((queue * batchSize * this.#world) / spec.lanes) + 1 : perBatch;
  }

  /** Number of samples that the next batches take from each ring. */
  #needed(batches: number): Map<number, number> {
    const { lanes } = this.#options.spec;
    const needed = new Map<number, number>();
    const end = this.#sample + batches * this.#options.batchSize * this.#world;
    for (let sample = this.#sample; sample < end; sample++) {
      const place = this.#lanes.indexOf(sample % lanes);
      if (place >= 0) needed.set(place, (needed.get(place) ?? 0) + 1);
    }
    return needed;
  }

  #report(pipeline: Pipeline): void {
    const { report } = this.#options;
    if (report === undefined || report.every === 0) return;
    const { documents, bytes } = pipeline.counts;
    if (documents - this.#reported < report.every) return;
    this.#reported = documents;
    report.say(documents, bytes);
  }

  /** Everything besides the tokens that determines sample k. */
  #settings(): SampleSettings {
    const { seed, splitSeed, valFraction, shuffle } = this.#options.spec;
    const split = valFraction > 0 ? { split_seed: splitSeed } : {};
    return { seed, seq_len: this.#options.sequenceLength, val_fraction: valFraction, ...split, shuffle };
  }
}

/** Windows in memory as `Samples`. `position` is the index of a window. */
function windowSamples(windows: readonly Int32Array[]): Samples {
  return {
    perEpoch: Number.POSITIVE_INFINITY,
    locate: (index) => ({ id: index, epoch: 0, position: index }),
    read: ({ position }, target) => {
      const window = windows[position];
      for (let index = 0; index < target.length; index++)
        target[index] = window[index] === NO_TOKEN ? 0 : window[index] & TOKEN_MASK;
    },
    maskTargets: ({ position }, targets) => {
      const end = windows[position].indexOf(NO_TOKEN);
      if (end >= 0) targets.fill(IGNORED_TARGET, end - 1);
    },
    documentStarts: ({ position }) => {
      const starts: number[] = [];
      const window = windows[position];
      for (let index = 0; index < window.length; index++)
        if (window[index] > 0 && window[index] & DOCUMENT_START) starts.push(index);
      return starts;
    },
  };
}
