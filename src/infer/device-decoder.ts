/**
 * Decoding on a GPU: each step replays one CUDA graph, recorded once per batch size. The host allocates cache pages (one every 64
 * tokens), uploads the tokens if it samples them itself, and synchronizes once, when it reads the result.
 */
import type { CudaDevice } from '../device/cuda/cuda.js';
import type { CudaGraph } from '../device/cuda/stream.js';
import { ResultCopies } from '../device/host-memory.js';
import type { CachedSequence, DecodeCache, PageKind } from '../model/cache.js';
import {
  DecodeStep,
  type DecodeStepOptions,
  decodeStepContext,
  decodeStepRefusal,
  decodeStepSharedContext,
} from '../model/decode-step.js';
import type { LanguageModel } from '../model/language-model.js';

export interface DeviceDecoderOptions extends Omit<DecodeStepOptions, 'context'> {
  /** False launches every kernel of every step. */
  readonly graph?: boolean;
}

/** Initial capacity of the score buffers [tokens]. It is doubled when a sequence comes within `HEADROOM` of it. */
const FIRST_CONTEXT = 8192;
const HEADROOM = 1024;
/** Capacity grows by this where twice as much would not leave the scores in shared memory [tokens]. */
const SHARED_STEP = 4096;
/** A capacity in such steps rather than doubled to this, although that fits. Longer ones decide which kernels run (spread.ts). */
const NOT_DOUBLED = 131_072;
/** Batch sizes whose steps are kept, with their graphs and buffers. */
const MAX_STEPS = 8;
/** Pages are allocated for this many tokens ahead, for each sequence once in half as many steps. */
const AHEAD_TOKENS = 64;

/** The step of one batch size. What it computes for is in device memory, so it serves any sequences. */
interface RecordedStep {
  readonly step: DecodeStep;
  /** A step runs once before it is recorded, so that all of its kernels are compiled. */
  hasRun: boolean;
  graph: CudaGraph | null;
  /** Copies of what was uploaded: lengths of the sequences, and addresses of their page tables. */
  lengths: number[];
  readonly addresses: Map<PageKind, BigUint64Array>;
}

export class DeviceDecoder {
  readonly #model: LanguageModel;
  readonly #cache: DecodeCache;
  readonly #options: DeviceDecoderOptions;
  /** By batch size, the most recently used last. */
  readonly #steps = new Map<number, RecordedStep>();
  #current: RecordedStep | null = null;
  #sequences: readonly CachedSequence[] = [];
  #forks: number[] = [];
  /** Number of further steps that need no upload: all their pages are in the device's tables. */
  #slack = 0;
  /** The sequence whose pages are allocated ahead next. */
  #turn = 0;
  #copies: ResultCopies | null = null;

  /** The caller has checked `deviceDecoderRefusal`. */
  constructor(model: LanguageModel, cache: DecodeCache, options: DeviceDecoderOptions = {}) {
    this.#model = model;
    this.#cache = cache;
    this.#options = options;
  }

  /** Whether the next token of each sequence is within the context limit of the GPU. */
  hasRoom(sequences: readonly CachedSequence[]): boolean {
    const longest = longestAfter(sequences);
    if (longest <= (this.#steps.get(sequences.length)?.step.context ?? 0)) return true;
    return longest <= this.#mostContext(sequences);
  }

  /**
   * Launches a step that appends `tokens[i]` to sequence i. Without `tokens` it appends the tokens of `next` of the previous
   * step, which must have had the same sequences. With `settings` (`sampleRows`) the next tokens are drawn.
   */
  launch(
    sequences: readonly CachedSequence[],
    tokens: readonly number[] | null = null,
    settings: Float64Array | null = null,
  ): void {
    const isReady = this.#isReady(sequences);
    if (!isReady) this.prepare(sequences);
    const recorded = this.#launched();
    if (tokens) recorded.step.ids.write(tokens);
    this.#run(recorded);
    if (settings) recorded.step.sample(settings);
    this.#slack -= 1;
    sequences.forEach((sequence, i) => {
      if (isReady) sequence.advance(1);
      else this.#cache.grow(sequence);
      recorded.lengths[i] += 1;
    });
  }

  /** Allocates pages for the next token of each sequence and uploads their tables. `launch` calls it when needed. */
  prepare(sequences: readonly CachedSequence[]): DecodeStep {
    const recorded = this.#stepFor(sequences);
    const { step } = recorded;
    for (const sequence of sequences) this.#cache.reserve(sequence);
    this.#point(recorded, sequences);
    const lengths = sequences.map(({ length }) => length);
    if (lengths.some((length, i) => length !== recorded.lengths[i])) step.place(lengths);
    recorded.lengths = lengths;
    this.#forks = sequences.map(({ forks }) => forks);
    const room = sequences.map((sequence) => Math.min(this.#cache.slack(sequence), step.context - sequence.length));
    this.#slack = Math.min(...room);
    return step;
  }

  /**
   * Allocates pages of tokens to come for a few of the sequences of the last step while the GPU computes it, so that no step
   * waits until all sequences have their next page. `room`: the most tokens that sequence i may be given ahead.
   */
  reserveAhead(room: (i: number) => number): void {
    const { addresses } = this.#launched();
    const count = Math.ceil((2 * this.#sequences.length) / AHEAD_TOKENS);
    for (let n = 0; n < count; n++) {
      this.#turn = (this.#turn + 1) % this.#sequences.length;
      const i = this.#turn;
      const sequence = this.#sequences[i];
      const tokens = Math.min(AHEAD_TOKENS, room(i));
      if (tokens < 1) continue;
      this.#cache.reserve(sequence, tokens);
      const isMoved = this.#cache.kinds.some((kind) => sequence.table(kind) !== addresses.get(kind)?.[i]);
      if (isMoved) this.#slack = 0; // the next launch uploads the addresses of the tables
    }
  }

  /** The step that was launched last; null before the first. */
  get step(): DecodeStep | null {
    return this.#current?.step ?? null;
  }

  /** The next token of each sequence; negative if the host must choose it from the logits. Synchronizes. */
  next(): Int32Array {
    return this.#launched().step.next.read() as Int32Array;
  }

  /**
   * The tokens of `next` of the step that was launched last, to be read after another one was launched. Returns a function that
   * waits for them. At most two may be unread.
   */
  nextLater(): () => Int32Array {
    const { next } = this.#launched().step;
    if (!this.#copies || this.#copies.bytes < next.bytes) {
      this.#copies?.free();
      this.#copies = new ResultCopies(this.#model.device, Math.max(4096, 2 * next.bytes));
    }
    const bytes = this.#copies.start(next.pointer, next.bytes);
    return () => new Int32Array(bytes().buffer);
  }

  /** Logits after each sequence. Synchronizes. */
  logits(): Float32Array[] {
    const { logits, batch } = this.#launched().step;
    const all = logits.read() as Float32Array;
    const width = all.length / batch;
    return Array.from({ length: batch }, (_, i) => all.subarray(i * width, (i + 1) * width));
  }

  /** Logits after sequence `i` alone. Synchronizes. */
  logitsOf(i: number): Float32Array {
    return this.#launched()
      .step.logits.rows(i, i + 1)
      .read() as Float32Array;
  }

  free(): void {
    for (const batch of [...this.#steps.keys()]) this.#forget(batch);
    this.#copies?.free();
    this.#copies = null;
  }

  #launched(): RecordedStep {
    if (!this.#current) throw new Error('no step was launched yet');
    return this.#current;
  }

  /** Whether the sequences are unchanged since the last step and their next pages are already uploaded. */
  #isReady(sequences: readonly CachedSequence[]): boolean {
    if (this.#slack <= 0 || sequences.length !== this.#sequences.length) return false;
    return sequences.every(
      (sequence, i) =>
        sequence === this.#sequences[i] &&
        sequence.length === this.#current?.lengths[i] &&
        sequence.forks === this.#forks[i],
    );
  }

  #stepFor(sequences: readonly CachedSequence[]): RecordedStep {
    const batch = sequences.length;
    const isSame = batch === this.#sequences.length && sequences.every((one, i) => one === this.#sequences[i]);
    if (!isSame && new Set(sequences).size !== batch) throw new Error('a sequence cannot be twice in one step');
    const longest = longestAfter(sequences);
    const known = this.#steps.get(batch);
    const isLongEnough = known !== undefined && longest <= known.step.context;
    // The argmax tokens of the last step are the input of the next one.
    const carried = isSame && !isLongEnough ? (known?.step.ids.read() ?? null) : null;
    if (!isLongEnough) this.#forget(batch);
    for (const oldest of [...this.#steps.keys()].slice(0, isLongEnough ? 0 : -MAX_STEPS + 1)) this.#forget(oldest);
    const recorded = isLongEnough ? known : this.#create(sequences, longest);
    if (carried) recorded.step.ids.write(carried);
    this.#steps.delete(batch); // and set again as the most recent one
    this.#steps.set(batch, recorded);
    this.#current = recorded;
    this.#sequences = [...sequences];
    return recorded;
  }

  #create(sequences: readonly CachedSequence[], longest: number): RecordedStep {
    const shared = decodeStepSharedContext(this.#model, sequences.length, this.#options.cluster);
    const context = stepCapacity(longest, shared, this.#mostContext(sequences));
    const { graph: _, ...options } = this.#options;
    const step = new DecodeStep(this.#model, this.#cache, sequences.length, { ...options, context });
    return { step, hasRun: false, graph: null, lengths: [], addresses: new Map() };
  }

  #mostContext({ length }: readonly CachedSequence[]): number {
    return decodeStepContext(this.#model, length, this.#options.cluster);
  }

  #point({ step, addresses: uploaded }: RecordedStep, sequences: readonly CachedSequence[]): void {
    for (const kind of this.#cache.kinds) {
      const held = uploaded.get(kind);
      const addresses = held ?? new BigUint64Array(sequences.length);
      let isChanged = !held;
      sequences.forEach((sequence, i) => {
        const address = sequence.table(kind);
        if (addresses[i] === address) return;
        addresses[i] = address;
        isChanged = true;
      });
      uploaded.set(kind, addresses);
      if (isChanged) step.point(kind, addresses);
    }
  }

  #run(recorded: RecordedStep): void {
    const device = this.#model.device as CudaDevice; // checked by deviceDecoderRefusal
    const { step } = recorded;
    if (!recorded.hasRun || this.#options.graph === false) {
      step.launch();
      recorded.hasRun = true;
      return;
    }
    recorded.graph ??= device.record(() => step.launch());
    recorded.graph.replay();
  }

  #forget(batch: number): void {
    const recorded = this.#steps.get(batch);
    if (!recorded) return;
    this.#steps.delete(batch);
    recorded.graph?.free();
    recorded.step.free();
    if (this.#current !== recorded) return;
    this.#current = null;
    this.#slack = 0;
    this.#sequences = [];
  }
}

/**
 * Tokens of context that a step is made for whose longest sequence has `longest`: `shared` keep all scores in shared memory,
 * `most` are possible. Scores in shared memory are worth less room, and then as little as possible: the L1 cache has the rest.
 */
export function stepCapacity(longest: number, shared: number, most: number): number {
  let context = FIRST_CONTEXT;
  while (context < longest + HEADROOM) context *= 2;
  const least = SHARED_STEP * Math.ceil((longest + HEADROOM) / SHARED_STEP);
  if ((context > shared || context === NOT_DOUBLED) && least <= shared) context = least;
  return Math.max(longest, Math.min(context, most));
}

/** Tokens of the longest sequence after one more step. */
function longestAfter(sequences: readonly CachedSequence[]): number {
  return sequences.reduce((most, { length }) => Math.max(most, length + 1), 0);
}

/** The reason why a model cannot be decoded with graphs; null if it can. */
export function deviceDecoderRefusal(model: LanguageModel): string | null {
  const canRecord = model.device.kind === 'cuda' && 'record' in model.device;
  return canRecord ? decodeStepRefusal(model) : `${model.device.kind} records no graphs`;
}
