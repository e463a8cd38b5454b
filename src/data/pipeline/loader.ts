/**
 * Batches of a streamed corpus. Worker threads fill rings of samples ahead of the trainer; `next` takes what is there,
 * `ready` waits for it without blocking the thread, so that signals are heard.
 *
 * Sample k of the run is the next one of lane k mod L (corpus/order.ts). A call of `next` on all W ranks takes the samples
 * [n, n + B * W); rank r takes those with k mod W = r, and reads only the lanes they come from. The position is the number
 * n and one cursor per lane: every rank knows those of its own lanes, `mergeStreamStates` joins them for a checkpoint.
 */

import { z } from 'zod';
import { ExitCode, TrefoilError, UsageError } from '../../errors.js';
import { type Batch, packBatch } from '../batch.js';
import { type Cursor, START } from '../corpus/documents.js';
import { corpusIdentity } from '../corpus/order.js';
import { DOCUMENT_START, TOKEN_MASK } from '../corpus/samples.js';
import type { CorpusSpec } from '../corpus/spec.js';
import type { Loader, LoaderTelemetry } from '../loader.js';
import type { SampleAddress, Samples } from '../stream.js';
import { createTokenizer } from '../tokenizer.js';
import type { LaneTask, StreamTask } from './messages.js';
import { createRing, Ring } from './ring.js';
import { PipelineWorkers } from './workers.js';

export interface StreamLoaderOptions {
  readonly spec: CorpusSpec;
  readonly tokenizer: string;
  readonly seq_len: number;
  readonly batch_size: number;
  readonly document_mask?: boolean | undefined;
  /** The model's vocabulary, an upper bound for the tokenizer's. */
  readonly vocab_size?: number | undefined;
  readonly workers: number;
  /** Documents tokenised before the network gets a turn. */
  readonly documentBatch: number;
  /** Read ahead of the trainer, so many batches; false: a batch is made when it is asked for. */
  readonly prefetch: boolean;
  readonly queue: number;
  /** Seconds after which a batch that does not come is an error. */
  readonly timeout: number;
  /** Default 0 of 1. */
  readonly rank?: number | undefined;
  readonly world?: number | undefined;
  /** Called after a batch, when at least `every` documents were read since the last call. */
  readonly report?: { readonly every: number; readonly say: (documents: number, bytes: number) => void } | undefined;
}

const CursorState = z.strictObject({
  turn: z.number().int().min(0),
  block: z.number().int().min(0),
  document: z.number().int().min(0),
  token: z.number().int().min(0),
});
const StreamState = z.strictObject({
  version: z.literal(1),
  kind: z.literal('stream'),
  /** Number of the next sample in the order of the run, over all ranks. */
  sample: z.number().int().min(0).max(Number.MAX_SAFE_INTEGER),
  epoch: z.number().int().min(0),
  dataset: z.string(),
  seed: z.number(),
  seq_len: z.number(),
  val_fraction: z.number(),
  shuffle: z.boolean(),
  /** Where each lane goes on; null for a lane that this rank does not read. */
  lanes: z.array(CursorState.nullable()).min(1),
});
export type StreamState = z.infer<typeof StreamState>;

/** Joins what the ranks know to one state that any number of ranks can go on from. */
export function mergeStreamStates(states: readonly StreamState[]): StreamState {
  const lanes = states[0].lanes.map(
    (_, lane) => states.find((state) => state.lanes[lane] !== null)?.lanes[lane] ?? null,
  );
  if (states.some(({ sample, dataset }) => sample !== states[0].sample || dataset !== states[0].dataset))
    throw new TrefoilError('data position: the ranks are not at the same sample of the same data');
  return { ...states[0], epoch: Math.max(...states.map(({ epoch }) => epoch)), lanes };
}

export async function createStreamLoader(options: StreamLoaderOptions): Promise<StreamLoader> {
  const tokenizer = createTokenizer(options.tokenizer);
  if (options.vocab_size !== undefined && tokenizer.vocabSize > options.vocab_size) {
    throw new UsageError(
      `data.tokenizer: ${options.tokenizer} has ${tokenizer.vocabSize} tokens, more than the vocabulary of ` +
        `${options.vocab_size}; raise it to at least ${tokenizer.vocabSize} or choose another tokenizer`,
    );
  }
  const { rank = 0, world = 1 } = options;
  if (!(Number.isInteger(rank) && rank >= 0 && rank < world))
    throw new UsageError(`rank: ${rank} is not below ${world}`);
  const identity = corpusIdentity(options.spec, tokenizer.identity);
  return new StreamLoader(options, options.vocab_size ?? tokenizer.vocabSize, identity);
}

export class StreamLoader implements Loader {
  readonly vocabSize: number;
  readonly tokensPerEpoch = Number.POSITIVE_INFINITY;
  readonly samplesPerEpoch = Number.POSITIVE_INFINITY;
  readonly #options: StreamLoaderOptions;
  readonly #identity: string;
  readonly #rank: number;
  readonly #world: number;
  /** Lanes this rank reads, ascending; a lane's place here is the number of its ring. */
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

  constructor(options: StreamLoaderOptions, vocabSize: number, identity: string) {
    this.#options = options;
    this.vocabSize = vocabSize;
    this.#identity = identity;
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

  get validationSamples(): number {
    if (this.#options.spec.valFraction === 0) return 0;
    return this.#validationEnded ? this.#validation.length : Number.POSITIVE_INFINITY;
  }

  /** Starts reading from the present position; `next` and `ready` do so by themselves. */
  async start(): Promise<void> {
    if (this.#closed) throw new TrefoilError('the data loader is closed');
    if (this.#pipeline !== undefined) return;
    const { spec, seq_len, documentBatch, tokenizer, prefetch } = this.#options;
    const validationRing = this.#lanes.length;
    const ring = createRing({
      lanes: this.#lanes.length + 1,
      slots: this.#slots(),
      sequenceLength: seq_len,
      workers: this.#workerCount,
    });
    const lanes: LaneTask[] = this.#lanes.map((lane, place) => ({
      ...{ lane, ring: place, side: 'train' },
      cursor: this.#cursors[lane]!,
    }));
    // Validation documents are read only when they are asked for; the thread that does it takes turns with its lanes.
    lanes.push({ lane: 0, ring: validationRing, side: 'validation', cursor: START });
    const tasks = Array.from(
      { length: this.#workerCount },
      (_, worker): Omit<StreamTask, 'port'> => ({
        ...{ kind: 'stream', worker, spec, ring, tokenizer, documentBatch, fetchAhead: prefetch },
        lanes: lanes.filter((task) => task.ring % this.#workerCount === worker),
      }),
    );
    this.#pipeline = new Pipeline(new Ring(ring), await PipelineWorkers.start(tasks), this.#workerCount);
    if (prefetch) for (const place of this.#lanes.keys()) this.#pipeline.grant(place, this.#slots());
  }

  /** Resolves when `batches` can be taken without waiting; at most as many as the queue holds are waited for. */
  async ready(batches: number): Promise<void> {
    await this.start();
    const pipeline = this.#pipeline!;
    const most = this.#options.prefetch ? Math.min(batches, this.#options.queue) : 1;
    const needed = this.#needed(most);
    for (const [place, count] of needed) pipeline.grantAtLeast(place, pipeline.taken(place) + count);
    // The lane that is filled last comes first: when it tells, the others are mostly there, and need not.
    for (const [place, count] of [...needed].reverse()) await pipeline.until(place, count, this.#options.timeout);
  }

  isReady(batches: number): boolean {
    const pipeline = this.#pipeline;
    if (pipeline === undefined) return false;
    return [...this.#needed(batches)].every(([place, count]) => pipeline.available(place) >= count);
  }

  next(): Batch {
    const pipeline = this.#running();
    const { batch_size: rows, seq_len: sequenceLength, document_mask: documentMask = false } = this.#options;
    const { lanes } = this.#options.spec;
    const taken: { address: SampleAddress; window: Int32Array; place: number }[] = [];
    // Applied when the batch is whole: a source that dies in the middle leaves the position before it.
    const moved = new Map<number, Cursor>();
    const first = this.#sample;
    for (let sample = first; sample < first + rows * this.#world; sample++) {
      const place = this.#lanes.indexOf(sample % lanes);
      if (place < 0) continue;
      const { window, cursor, epoch } = pipeline.take(place, this.#options.timeout);
      moved.set(sample % lanes, cursor);
      this.#epoch = Math.max(this.#epoch, epoch);
      // Other ranks may share the lane (when their number does not divide that of the lanes): theirs is passed over.
      if (sample % this.#world === this.#rank)
        taken.push({ address: { id: sample, epoch, position: taken.length }, window, place });
      if (this.#options.prefetch) pipeline.grant(place, pipeline.taken(place) + this.#slots());
    }
    const windows = windowSamples(taken.map(({ window }) => window));
    const batch = packBatch(
      windows,
      taken.map(({ address }) => address),
      { sequenceLength, documentMask },
    );
    for (const [lane, cursor] of moved) this.#cursors[lane] = cursor;
    this.#sample += rows * this.#world;
    this.#report(pipeline);
    return batch;
  }

  telemetry(): LoaderTelemetry {
    const pipeline = this.#pipeline;
    if (pipeline === undefined) return { documents: 0, bytes: 0, queueFill: 0 };
    const { lanes, batch_size } = { ...this.#options.spec, ...this.#options };
    const perBatch = batch_size * (this.#lanes.length / lanes) * this.#world;
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
    const result = StreamState.safeParse(value);
    if (!result.success) {
      const issue = result.error.issues[0];
      throw new UsageError(`checkpoint: data position: ${issue.path.join('.') || 'value'}: ${issue.message}`);
    }
    const state = result.data;
    if (state.dataset !== this.#identity) {
      throw new UsageError(
        `the data is other than this run was trained on (${this.#identity.slice(0, 12)}, not ` +
          `${state.dataset.slice(0, 12)}); use the same files and tokenizer, or start a new run from the weights`,
      );
    }
    for (const [key, now] of Object.entries(this.#settings())) {
      const before = state[key as keyof StreamState];
      if (before === now) continue;
      throw new UsageError(
        `${key} is ${now}, but was ${before} when this run was saved, which gives another order of the data; ` +
          'set it back or start a new run from the weights',
      );
    }
    const missing = this.#lanes.filter((lane) => state.lanes[lane] == null);
    if (missing.length > 0)
      throw new UsageError(
        `checkpoint: data position: lanes ${missing.join(', ')} are missing: not all ranks were saved`,
      );
    this.#pipeline?.close();
    this.#pipeline = undefined;
    // Validation is read by the pipeline too, and a new one reads it from its start.
    this.#validation.length = 0;
    this.#validationEnded = false;
    this.#sample = state.sample;
    this.#epoch = state.epoch;
    this.#cursors = state.lanes.map((cursor, lane) => (this.#lanes.includes(lane) ? cursor : null));
  }

  async readyToEvaluate(batches: number): Promise<void> {
    if (this.#options.spec.valFraction === 0) return;
    await this.start();
    const pipeline = this.#pipeline!;
    const place = this.#lanes.length;
    const samples = batches * this.#options.batch_size * this.#world;
    while (this.#validation.length < samples && !this.#validationEnded) {
      this.#grantValidation(pipeline, samples);
      await pipeline.until(place, 1, this.#options.timeout);
      this.#takeValidation(pipeline);
    }
  }

  /** Validation samples are read at the first call and kept; without `readyToEvaluate` before, that blocks. */
  *evalBatches(count: number): Generator<Batch> {
    if (this.#options.spec.valFraction === 0)
      throw new UsageError('data.val_fraction is 0: there is nothing to evaluate on; set it above 0');
    const { batch_size: rows, seq_len: sequenceLength, document_mask: documentMask = false } = this.#options;
    const perStep = rows * this.#world;
    const kept = this.#readValidation(count * perStep);
    const used = Math.min(kept.length, count * perStep);
    if (used === 0)
      throw new UsageError('data.val_fraction: sets too few documents aside for one sample; raise it, or set it to 0');
    for (let start = 0; start < used; start += perStep) {
      const first = start + this.#rank * rows;
      const counted = Math.max(0, Math.min(rows, used - first));
      // Filling rows repeat the last sample.
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
    else this.#validation.push(sample.window);
  }

  /** Slots in each ring, so that all together hold the queue. */
  #slots(): number {
    const { batch_size, queue, prefetch, spec } = this.#options;
    const perBatch = Math.ceil((batch_size * this.#world) / spec.lanes);
    return prefetch ? Math.ceil((queue * batch_size * this.#world) / spec.lanes) + 1 : perBatch;
  }

  /** How many samples of each ring the next batches take. */
  #needed(batches: number): Map<number, number> {
    const { lanes } = this.#options.spec;
    const needed = new Map<number, number>();
    const end = this.#sample + batches * this.#options.batch_size * this.#world;
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

  /** Everything besides the tokens that decides what sample k is. */
  #settings(): { seed: number; seq_len: number; val_fraction: number; shuffle: boolean } {
    const { seed, valFraction, shuffle } = this.#options.spec;
    return { seed, seq_len: this.#options.seq_len, val_fraction: valFraction, shuffle };
  }
}

/** The rings and the threads that fill them, from the trainer's side. */
class Pipeline {
  readonly #ring: Ring;
  readonly #workers: PipelineWorkers;
  readonly #workerCount: number;
  readonly #taken: number[];

  constructor(ring: Ring, workers: PipelineWorkers, workerCount: number) {
    this.#ring = ring;
    this.#workers = workers;
    this.#workerCount = workerCount;
    this.#taken = new Array(ring.shape.lanes).fill(0);
  }

  get counts(): { documents: number; bytes: number } {
    return this.#ring.counts;
  }

  taken(place: number): number {
    return this.#taken[place];
  }

  available(place: number): number {
    return this.#ring.produced(place) - this.#taken[place];
  }

  grant(place: number, upTo: number): void {
    const worker = place % this.#workerCount;
    if (this.#ring.grant(place, upTo, worker)) this.#workers.wake(worker);
  }

  grantAtLeast(place: number, upTo: number): void {
    if (this.#ring.granted(place) < upTo) this.grant(place, upTo);
  }

  /** Waits, without blocking the thread, until a lane has so many samples or no more at all. */
  async until(place: number, count: number, timeoutSeconds: number): Promise<void> {
    const isReady = () => this.available(place) >= count || this.#ring.hasEnded(place);
    const end = performance.now() + 1000 * timeoutSeconds;
    while (!isReady()) {
      const failure = this.#workers.failure();
      if (failure !== undefined) throw failure;
      const left = end - performance.now();
      if (left <= 0) throw timeOut(timeoutSeconds);
      await this.#workers.news(left, () => {
        this.#ring.announceWait(place);
        return isReady();
      });
    }
  }

  /** The next sample of a ring, copied out of it; blocks until there is one. */
  take(place: number, timeoutSeconds: number): { window: Int32Array; cursor: Cursor; epoch: number } {
    const sample = this.takeUnlessEnded(place, timeoutSeconds);
    if (sample === undefined) throw new TrefoilError('a data lane ended: training data has no end');
    return sample;
  }

  takeUnlessEnded(
    place: number,
    timeoutSeconds: number,
  ): { window: Int32Array; cursor: Cursor; epoch: number } | undefined {
    const end = performance.now() + 1000 * timeoutSeconds;
    this.grantAtLeast(place, this.#taken[place] + 1);
    for (;;) {
      const seen = this.#ring.news;
      if (this.available(place) > 0) break;
      if (this.#ring.hasEnded(place)) return undefined;
      const failure = this.#ring.failed ? this.#workers.failure() : undefined;
      if (failure !== undefined) throw failure;
      const left = end - performance.now();
      if (left <= 0) throw timeOut(timeoutSeconds);
      this.#ring.waitForNews(seen, left);
    }
    const sample = this.#taken[place]++;
    return { window: this.#ring.window(place, sample).slice(), ...this.#ring.place(place, sample) };
  }

  close(): void {
    this.#workers.close();
  }
}

/** Windows that are in memory already, as packing takes them. `position` is their number. */
function windowSamples(windows: readonly Int32Array[]): Samples {
  return {
    perEpoch: Number.POSITIVE_INFINITY,
    locate: (index) => ({ id: index, epoch: 0, position: index }),
    read: ({ position }, target) => {
      const window = windows[position];
      for (let index = 0; index < target.length; index++) target[index] = window[index] & TOKEN_MASK;
    },
    documentStarts: ({ position }) => {
      const starts: number[] = [];
      const window = windows[position];
      for (let index = 0; index < window.length; index++) if (window[index] & DOCUMENT_START) starts.push(index);
      return starts;
    },
  };
}

function timeOut(seconds: number): TrefoilError {
  const remedy = 'check the source, or allow more with --loader-timeout';
  return new TrefoilError(`the data source gave nothing for ${seconds} s: ${remedy}`, ExitCode.dataSource);
}

function greatestCommonDivisor(a: number, b: number): number {
  return b === 0 ? a : greatestCommonDivisor(b, a % b);
}
