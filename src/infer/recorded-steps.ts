/**
 * Decoding on a CPU: the kernel calls of a step are recorded and repeated for later tokens, since JavaScript between them
 * takes as long as a fifth of the kernels. What differs from token to token is in device memory.
 */
import { canRecord, type LaunchList, type RecordingDevice } from '../device/device.js';
import type { MemoryPool } from '../device/pool.js';
import type { CachedSequence, CacheStep, DecodeCache } from '../model/cache.js';
import type { LanguageModel } from '../model/language-model.js';
import type { ModelShape } from '../model/shape.js';
import type { SparseOptions } from '../ops/attention/nsa.js';
import { Tape } from '../tensor/tape.js';
import { bytesOf, Tensor } from '../tensor/tensor.js';

/** Lists that are kept. With compressed keys there is one for each number of rows that wait for their block. */
const MAX_LISTS = 256;

/** The memory that all lists of one batch size read and write. */
interface Batch {
  readonly step: CacheStep;
  readonly ids: Tensor;
  /** By `DecodeCache.sizesOfStep`. */
  readonly lists: Map<string, { readonly list: LaunchList; readonly logits: bigint }>;
}

export class RecordedSteps {
  readonly #model: LanguageModel;
  readonly #device: RecordingDevice;
  readonly #kernels: SparseOptions;
  readonly #pool: MemoryPool;
  readonly #batches = new Map<number, Batch>();
  #shape: ModelShape;
  #cache: DecodeCache | null = null;
  #lists = 0;
  /** Sizes of steps that came once: the second is recorded, so that a short text does not pay for what it never repeats. */
  readonly #seen = new Set<string>();
  /** Whether a pass could not be repeated: no other is tried. */
  #isRefused = false;

  constructor(model: LanguageModel, device: RecordingDevice, kernels: SparseOptions = {}) {
    this.#model = model;
    this.#device = device;
    this.#kernels = kernels;
    this.#pool = device.newPool();
    this.#shape = model.shape;
  }

  /** Null for a model on a device that does not record. */
  static of(model: LanguageModel, kernels: SparseOptions = {}): RecordedSteps | null {
    return canRecord(model.device) ? new RecordedSteps(model, model.device, kernels) : null;
  }

  /**
   * Reads one token of each sequence; returns the logits after each, those of `readTokens` bit for bit. Null if the pass is
   * not one that can be repeated: then nothing has been read.
   */
  read(sequences: readonly CachedSequence[], tokens: readonly number[]): Float32Array[] | null {
    const { vocabSize } = this.#model.shape;
    const [{ cache }] = sequences;
    const areOld = sequences.every((sequence) => sequence.length > 0 && sequence.cache === cache);
    if (this.#isRefused || !areOld || tokens.some((id) => !(id >= 0 && id < vocabSize))) return null;
    const isOther = this.#model.shape !== this.#shape || cache !== this.#cache;
    if (isOther || this.#lists >= MAX_LISTS) this.#clear();
    this.#shape = this.#model.shape;
    this.#cache = cache;
    const sizes = cache.sizesOfStep(sequences);
    if (!this.#seen.has(sizes)) {
      this.#seen.add(sizes);
      return null;
    }
    let batch = this.#batches.get(sequences.length);
    if (batch) {
      batch.step.move(sequences);
      batch.ids.write(tokens);
    } else {
      const step = cache.begin(
        sequences,
        sequences.map(() => 1),
      );
      batch = { step, ids: Tensor.from(this.#device, tokens, [tokens.length], 'i32'), lists: new Map() };
      this.#batches.set(sequences.length, batch);
    }
    const recorded = batch.lists.get(sizes);
    recorded?.list.replay();
    const address = recorded?.logits ?? this.#record(batch, sizes);
    batch.step.commit();
    const logits = new Float32Array(sequences.length * vocabSize);
    this.#device.download(address, bytesOf(logits));
    return sequences.map((_, i) => logits.subarray(i * vocabSize, (i + 1) * vocabSize));
  }

  /** Computes a step, and keeps it if it can be repeated; returns the address of the logits. */
  #record({ step, ids, lists }: Batch, sizes: string): bigint {
    const model = this.#model;
    const rows = Array.from({ length: ids.size }, (_, i) => i);
    let logits = 0n;
    const list = this.#device.record(this.#pool, () => {
      const tape = new Tape(this.#device, { record: false });
      try {
        const options = { lengths: step.tokens.sequences, cache: step, kernels: this.#kernels };
        logits = model.logits(tape, ids, rows, options).pointer;
      } finally {
        tape.end();
      }
    });
    this.#isRefused = list === null;
    if (list !== null) {
      lists.set(sizes, { list, logits });
      this.#lists += 1;
    }
    return logits;
  }

  #clear(): void {
    for (const { step, ids, lists } of this.#batches.values()) {
      for (const { list } of lists.values()) list.free();
      step.free();
      ids.free();
    }
    this.#batches.clear();
    this.#seen.clear();
    this.#lists = 0;
  }

  /** Frees the lists and their memory. */
  free(): void {
    this.#clear();
    this.#device.dropPool(this.#pool);
  }
}
