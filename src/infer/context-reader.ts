/**
 * Scores of the next token of growing contexts: from the decode cache (on a GPU by replaying a graph), or with the
 * reference kernels by reading the whole context again.
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

/** Scores of the next token of each context. Valid until the next call of `ContextReader.next`. */
export interface NextTokenScores {
  logits(): Float32Array[];
  /** The most probable tokens, if the device computed them; -1 where a logit is not finite. */
  best?(): number[];
}

/** Reads contexts that grow from call to call, usually by one token. A context is identified by its array. */
export interface ContextReader {
  next(contexts: readonly (readonly number[])[]): NextTokenScores;
  free(): void;
}

/** `vocabulary`: only the first `vocabulary` logits are candidates. */
export function contextReader(model: LanguageModel, config: Config, vocabulary: number): ContextReader {
  const kernels = kernelOptions(config);
  // The reference kernels compute whole sequences only.
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

  next(contexts: readonly (readonly number[])[]): NextTokenScores {
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

  #step(decoder: DeviceDecoder, sequences: readonly CachedSequence[], fresh: readonly number[][]): NextTokenScores {
    decoder.launch(
      sequences,
      fresh.map(([token]) => token),
    );
    return { logits: () => decoder.logits(), best: () => Array.from(decoder.next()) };
  }

  #read(sequences: readonly CachedSequence[], fresh: readonly number[][]): Float32Array[] {
    const logits = prefill(this.#model, sequences, fresh, this.#tile, { kernels: this.#kernels });
    this.#model.device.pool.trim(); // a long prompt needs much more memory than the steps after it
    return logits;
  }
}

/** Runs the model over the whole context for every token, without a cache. */
function slowReader(model: LanguageModel, kernels: SparseOptions): ContextReader {
  let trimmedAt = 0;
  return {
    next(contexts) {
      const longest = Math.max(...contexts.map(({ length }) => length));
      // The pool keeps blocks of every size class that the growing context has used: return them from time to time.
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
    layout.free();
    tokens.free();
  }
}
