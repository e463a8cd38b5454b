/**
 * What follows some growing contexts: from the decode cache, on a GPU by replaying a graph, or with the reference kernels by
 * reading everything again.
 */
import type { Config } from '../config/schema.js';
import { type CachedSequence, DecodeCache } from '../model/cache.js';
import { kernelOptions } from '../model/kernels.js';
import type { LanguageModel } from '../model/language-model.js';
import { type SparseOptions, sparseLayout } from '../ops/attention/nsa.js';
import { Sequences } from '../ops/common/sequences.js';
import { Tape } from '../tensor/tape.js';
import { prefill, prefillTile, readTokens } from './decode.js';
import { DeviceDecoder, deviceDecoderRefusal } from './device-decoder.js';

/** What follows each context; valid until the next one is asked for. */
export interface Following {
  logits(): Float32Array[];
  /** The most probable tokens, where the device has found them; -1 where logits are not sound. */
  best?(): number[];
}

/** Contexts grow from call to call, usually by one token, and may drop out. */
export interface ContextReader {
  next(contexts: readonly (readonly number[])[]): Following;
  free(): void;
}

/** `vocabulary`: tokens that may follow. */
export function contextReader(model: LanguageModel, config: Config, vocabulary: number): ContextReader {
  const kernels = kernelOptions(config);
  // The reference computes whole sequences only.
  const isCached = !kernels.parity && kernels.kernel !== 'reference';
  return isCached ? new CachedReader(model, kernels, prefillTile(config), vocabulary) : slowReader(model, kernels);
}

class CachedReader implements ContextReader {
  readonly #model: LanguageModel;
  readonly #kernels: SparseOptions;
  readonly #tile: number | null;
  readonly #cache: DecodeCache;
  readonly #decoder: DeviceDecoder | null;
  readonly #held = new Map<readonly number[], CachedSequence>();

  constructor(model: LanguageModel, kernels: SparseOptions, tile: number | null, vocabulary: number) {
    this.#model = model;
    this.#kernels = kernels;
    this.#tile = tile;
    this.#cache = new DecodeCache(model.device, model.shape, model.dtype);
    this.#decoder = deviceDecoderRefusal(model) === null ? new DeviceDecoder(model, this.#cache, { vocabulary }) : null;
  }

  next(contexts: readonly (readonly number[])[]): Following {
    const sequences = contexts.map((context) => this.#sequence(context));
    const fresh = contexts.map((context, i) => context.slice(sequences[i].length));
    const isStep = contexts.every((_, i) => sequences[i].length > 0 && fresh[i].length === 1);
    if (isStep && this.#decoder?.hasRoom(sequences)) return this.#step(this.#decoder, sequences, fresh);
    const logits = isStep
      ? readTokens(this.#model, sequences, fresh, { kernels: this.#kernels })
      : this.#read(sequences, fresh);
    return { logits: () => logits };
  }

  free(): void {
    this.#decoder?.free();
    for (const sequence of this.#held.values()) sequence.free();
  }

  #sequence(context: readonly number[]): CachedSequence {
    let sequence = this.#held.get(context);
    if (!sequence) {
      sequence = this.#cache.sequence();
      this.#held.set(context, sequence);
    }
    return sequence;
  }

  #step(decoder: DeviceDecoder, sequences: readonly CachedSequence[], fresh: readonly number[][]): Following {
    decoder.launch(
      sequences,
      fresh.map(([token]) => token),
    );
    return { logits: () => decoder.logits(), best: () => Array.from(decoder.next()) };
  }

  #read(sequences: readonly CachedSequence[], fresh: readonly number[][]): Float32Array[] {
    const logits = prefill(this.#model, sequences, fresh, this.#tile, { kernels: this.#kernels });
    this.#model.device.pool.trim(); // a long prompt takes much more memory than any step after it
    return logits;
  }
}

/** Runs the whole context again for every token: where there is no cache. */
function slowReader(model: LanguageModel, kernels: SparseOptions): ContextReader {
  let trimmedAt = 0;
  return {
    next(contexts) {
      const longest = Math.max(...contexts.map(({ length }) => length));
      // The pool keeps a block of every size class the growing context went through: give them back now and then.
      if (longest > trimmedAt * 1.125) {
        model.device.pool.trim();
        trimmedAt = longest;
      }
      const logits = contexts.map((context) => lastLogits(model, context, kernels));
      return { logits: () => logits };
    },
    free() {},
  };
}

/** Logits of the token that follows `context`. */
export function lastLogits(
  model: LanguageModel,
  context: readonly number[],
  kernels: SparseOptions = {},
): Float32Array {
  const { device, shape } = model;
  const tokens = new Sequences(device, [context.length]);
  const layout = sparseLayout(tokens, shape.nsa);
  const tape = new Tape(device, { record: false });
  try {
    const ids = tape.from(context, [context.length], 'i32');
    const logits = model.logits(tape, ids, [context.length - 1], { layout, kernels });
    return Float32Array.from(logits.read());
  } finally {
    tape.end();
    layout.blocks.free();
    tokens.free();
  }
}
