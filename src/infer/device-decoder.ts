/**
 * Decoding on a GPU: each step of the same sequences replays one CUDA graph. The host allocates cache pages (one every 64
 * tokens), uploads the tokens if it samples them itself, and synchronizes once, when it reads the result.
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

/** Initial capacity of the score buffers [tokens]. It is doubled when a sequence comes within `HEADROOM` of it. */
const FIRST_CONTEXT = 8192;
const HEADROOM = 1024;

export class DeviceDecoder {
  readonly #model: LanguageModel;
  readonly #cache: DecodeCache;
  readonly #options: DeviceDecoderOptions;
  #sequences: readonly CachedSequence[] = [];
  /** Copies of what was uploaded: lengths of the sequences, and addresses of their page tables. */
  #lengths: number[] = [];
  #addresses = new Map<Kind, BigUint64Array>();
  #forks: number[] = [];
  /** Number of further steps that need no upload: all their pages are in the device's tables. */
  #slack = 0;
  #step: DeviceStep | null = null;
  /** A step runs once before it is recorded, so that all of its kernels are compiled. */
  #hasRun = false;
  #graph: CudaGraph | null = null;

  /** The caller has checked `deviceDecoderRefusal`. */
  constructor(model: LanguageModel, cache: DecodeCache, options: DeviceDecoderOptions = {}) {
    this.#model = model;
    this.#cache = cache;
    this.#options = options;
  }

  /** Whether the next token of each sequence is within the context limit of the GPU. */
  hasRoom(sequences: readonly CachedSequence[]): boolean {
    const longest = longestAfter(sequences);
    if (this.#step?.batch === sequences.length && longest <= this.#step.context) return true;
    return longest <= this.#mostContext(sequences);
  }

  /**
   * Launches a step that appends `tokens[i]` to sequence i. Without `tokens` it appends the argmax tokens of the previous
   * step, which must have had the same sequences.
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

  /** Allocates pages for the next token of each sequence and uploads their tables. `launch` calls it when needed. */
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

  /** The argmax token after each sequence; -1 if all logits are NaN. Synchronizes. */
  next(): Int32Array {
    return this.#launched().next.read() as Int32Array;
  }

  /** Logits after each sequence. Synchronizes. */
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

  /** Whether the sequences are unchanged since the last step and their next pages are already uploaded. */
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
    const device = this.#model.device as CudaDevice; // checked by deviceDecoderRefusal
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

/** The reason why a model cannot be decoded with graphs; null if it can. */
export function deviceDecoderRefusal(model: LanguageModel): string | null {
  const canRecord = 'record' in model.device;
  return canRecord ? deviceStepRefusal(model) : `${model.device.kind} records no graphs`;
}
