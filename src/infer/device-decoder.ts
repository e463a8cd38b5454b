/**
 * Decoding on a GPU: token after token of the same sequences is one graph that is replayed. The host makes room in the cache
 * (a page every 64 tokens), writes the tokens if it draws them itself, and waits once, when it reads the result.
 */
import type { CudaDevice } from '../device/cuda/cuda.js';
import type { CudaGraph } from '../device/cuda/stream.js';
import type { CachedSequence, DecodeCache, Kind } from '../model/cache.js';
import { DeviceStep, type DeviceStepOptions, deviceStepContext, deviceStepRefusal } from '../model/device-step.js';
import type { LanguageModel } from '../model/language-model.js';

export interface DeviceDecoderOptions extends Omit<DeviceStepOptions, 'context'> {
  /** False launches every kernel of every step. */
  readonly graph?: boolean;
}

/** Room for scores is made for this many tokens, and doubled as far as it goes when a sequence comes near it. */
const FIRST_CONTEXT = 8192;
const HEADROOM = 1024;

export class DeviceDecoder {
  readonly #model: LanguageModel;
  readonly #cache: DecodeCache;
  readonly #options: DeviceDecoderOptions;
  #sequences: readonly CachedSequence[] = [];
  /** What the device holds: the sequences' lengths, and the addresses of their tables. */
  #lengths: number[] = [];
  #addresses = new Map<Kind, BigUint64Array>();
  #forks: number[] = [];
  /** Steps of these sequences for which the device knows all pages. */
  #slack = 0;
  #step: DeviceStep | null = null;
  /** A step runs once before it is recorded: then all of its kernels are compiled. */
  #hasRun = false;
  #graph: CudaGraph | null = null;

  /** The caller has asked `deviceDecoderRefusal`. */
  constructor(model: LanguageModel, cache: DecodeCache, options: DeviceDecoderOptions = {}) {
    this.#model = model;
    this.#cache = cache;
    this.#options = options;
  }

  /** Whether a step can take one more token of each sequence: that of very long ones needs more than a GPU may have. */
  hasRoom(sequences: readonly CachedSequence[]): boolean {
    const longest = longestAfter(sequences);
    if (this.#step?.batch === sequences.length && longest <= this.#step.context) return true;
    return longest <= this.#mostContext(sequences);
  }

  /**
   * Launches a step: `tokens[i]` follows sequence i, without `tokens` the most probable ones of the step before, which must
   * have been one of the same sequences.
   */
  launch(sequences: readonly CachedSequence[], tokens: readonly number[] | null = null): void {
    const ready = this.#isReady(sequences) ? this.#step : null;
    const step = ready ?? this.prepare(sequences);
    if (tokens) step.ids.write(tokens);
    this.#run(step);
    this.#slack -= 1;
    sequences.forEach((sequence, i) => {
      if (ready) sequence.advance(1);
      else this.#cache.grow(sequence);
      this.#lengths[i] += 1;
    });
  }

  /** Makes room for a token of each sequence and tells the device where; `launch` does it by itself. */
  prepare(sequences: readonly CachedSequence[]): DeviceStep {
    const step = this.#stepFor(sequences);
    for (const sequence of sequences) this.#cache.reserve(sequence);
    this.#point(step, sequences);
    const lengths = sequences.map(({ length }) => length);
    if (lengths.some((length, i) => length !== this.#lengths[i])) step.place(lengths);
    this.#lengths = lengths;
    this.#forks = sequences.map(({ forks }) => forks);
    const room = sequences.map((sequence) => Math.min(this.#cache.slack(sequence), step.context - sequence.length));
    this.#slack = Math.min(...room);
    return step;
  }

  /** The step that was launched last; null before the first. */
  get step(): DeviceStep | null {
    return this.#step;
  }

  /** The most probable token after each sequence; -1 where no logit is a number. Waits for the step. */
  next(): Int32Array {
    return this.#launched().next.read() as Int32Array;
  }

  /** Logits after each sequence. Waits for the step. */
  logits(): Float32Array[] {
    const { logits, batch } = this.#launched();
    const all = logits.read() as Float32Array;
    const width = all.length / batch;
    return Array.from({ length: batch }, (_, i) => all.subarray(i * width, (i + 1) * width));
  }

  free(): void {
    this.#forget();
  }

  #launched(): DeviceStep {
    if (!this.#step) throw new Error('no step was launched yet');
    return this.#step;
  }

  /** Nothing has happened to the sequences since the last step, and it left room for another. */
  #isReady(sequences: readonly CachedSequence[]): boolean {
    if (this.#slack <= 0 || sequences.length !== this.#sequences.length) return false;
    return sequences.every(
      (sequence, i) =>
        sequence === this.#sequences[i] && sequence.length === this.#lengths[i] && sequence.forks === this.#forks[i],
    );
  }

  #stepFor(sequences: readonly CachedSequence[]): DeviceStep {
    const isSame =
      sequences.length === this.#sequences.length && sequences.every((sequence, i) => sequence === this.#sequences[i]);
    const longest = longestAfter(sequences);
    if (this.#step && isSame && longest <= this.#step.context) return this.#step;
    if (new Set(sequences).size !== sequences.length) throw new Error('a sequence cannot be twice in one step');
    const before = this.#step;
    const carried = isSame ? (before?.ids.read() ?? null) : null;
    this.#forget();
    let context = FIRST_CONTEXT;
    while (context < longest + HEADROOM) context *= 2;
    context = Math.max(longest, Math.min(context, this.#mostContext(sequences)));
    const { graph: _, ...options } = this.#options;
    this.#step = new DeviceStep(this.#model, this.#cache, sequences.length, { ...options, context });
    if (carried) this.#step.ids.write(carried);
    this.#sequences = [...sequences];
    return this.#step;
  }

  #mostContext({ length }: readonly CachedSequence[]): number {
    return deviceStepContext(this.#model, length, this.#options.cluster);
  }

  #point(step: DeviceStep, sequences: readonly CachedSequence[]): void {
    for (const kind of this.#cache.kinds) {
      const held = this.#addresses.get(kind);
      const addresses = held ?? new BigUint64Array(sequences.length);
      let isChanged = !held;
      sequences.forEach((sequence, i) => {
        const address = sequence.table(kind);
        if (addresses[i] === address) return;
        addresses[i] = address;
        isChanged = true;
      });
      this.#addresses.set(kind, addresses);
      if (isChanged) step.point(kind, addresses);
    }
  }

  #run(step: DeviceStep): void {
    const device = this.#model.device as CudaDevice; // deviceDecoderRefusal has said so
    if (!this.#hasRun || this.#options.graph === false) {
      step.launch();
      this.#hasRun = true;
      return;
    }
    this.#graph ??= device.record(() => step.launch());
    this.#graph.replay();
  }

  #forget(): void {
    this.#graph?.free();
    this.#graph = null;
    this.#step?.free();
    this.#step = null;
    this.#hasRun = false;
    this.#lengths = [];
    this.#slack = 0;
    this.#addresses = new Map();
    this.#sequences = [];
  }
}

/** Tokens of the longest sequence after one more step. */
function longestAfter(sequences: readonly CachedSequence[]): number {
  return sequences.reduce((most, { length }) => Math.max(most, length + 1), 0);
}

/** Why a model cannot be decoded this way; null when it can. */
export function deviceDecoderRefusal(model: LanguageModel): string | null {
  const canRecord = 'record' in model.device;
  return canRecord ? deviceStepRefusal(model) : `${model.device.kind} records no graphs`;
}
