/**
 * Reading tokens with a model: prefill and decode on a cache, and `ContextReader`, which returns the scores of the next
 * token of contexts that grow. On a GPU a reader replays a graph; with the reference kernels it runs the model over the
 * whole context again.
 */
import type { Config } from '../config/schema.js';
import { UsageError } from '../errors.js';
import type { Observer } from '../model/attention.js';
import { type CachedSequence, DecodeCache } from '../model/cache.js';
import { kernelOptions } from '../model/kernels.js';
import type { LanguageModel } from '../model/language-model.js';
import { type SparseOptions, sparseLayout } from '../ops/attention/nsa.js';
import { Sequences } from '../ops/common/sequences.js';
import { Tape } from '../tensor/tape.js';
import { DeviceDecoder, deviceDecoderRefusal } from './device-decoder.js';
import { UnusableLogits } from './sampler.js';

/** Options of `prefill` and `readTokens`. */
export interface DecodeOptions {
  readonly kernels?: SparseOptions;
  readonly observer?: Observer;
}

/** Options of `readRows`. */
export interface ReadOptions extends DecodeOptions {
  /** Number of last tokens of each sequence that `CachedSequence.truncate` may take back. Default 0. */
  readonly drafts?: readonly number[];
}

/** How a prompt is read: `tokens` at a time, all of it when null. */
export function prefillTile({ runtime }: Pick<Config, 'runtime'>): number | null {
  if (!runtime.prefill_batched) return 1;
  return runtime.prefill_tile === 0 ? null : runtime.prefill_tile;
}

/** Reads new tokens, at least one for each sequence, in one pass; returns the logits after the last of each. */
export function readTokens(
  model: LanguageModel,
  sequences: readonly CachedSequence[],
  tokens: readonly (readonly number[])[],
  options: DecodeOptions = {},
): Float32Array[] {
  let end = 0;
  const last = tokens.map(({ length }) => {
    end += length;
    return end - 1;
  });
  return readRows(model, sequences, tokens, last, options);
}

/** Reads new tokens in one pass; returns the logits after each token of `rows`, indices into all tokens packed. */
export function readRows(
  model: LanguageModel,
  sequences: readonly CachedSequence[],
  tokens: readonly (readonly number[])[],
  rows: readonly number[],
  { kernels, observer, drafts }: ReadOptions = {},
): Float32Array[] {
  if (sequences.length === 0) throw new UsageError('readTokens: give at least one cached sequence');
  const [{ cache: owner }] = sequences;
  expectCache(model, owner);
  const cache = owner.begin(
    sequences,
    tokens.map(({ length }) => length),
    drafts,
  );
  const tape = new Tape(model.device, { record: false });
  try {
    const ids = tape.from(tokens.flat(), [cache.layout.tokens.total], 'i32');
    const options = { layout: cache.layout, cache, observer, ...(kernels ? { kernels } : {}) };
    let logits = new Float32Array();
    if (rows.length > 0) logits = model.logits(tape, ids, rows, options).read() as Float32Array<ArrayBuffer>;
    else model.hidden(tape, ids, options);
    cache.commit();
    const width = logits.length / rows.length;
    return rows.map((_, i) => logits.subarray(i * width, (i + 1) * width));
  } finally {
    tape.end();
    cache.free();
  }
}

/** The same for whole prompts, `tile` tokens of each at a time. */
export function prefill(
  model: LanguageModel,
  sequences: readonly CachedSequence[],
  prompts: readonly (readonly number[])[],
  tile: number | null = null,
  options: DecodeOptions = {},
): Float32Array[] {
  if (prompts.length !== sequences.length)
    throw new UsageError(`prefill: ${sequences.length} cached sequences were given ${prompts.length} prompts`);
  const empty = prompts.findIndex(({ length }) => length === 0);
  if (empty !== -1)
    throw new UsageError(
      `prefill: prompt ${empty} is empty; start with the tokenizer's separator for text from nothing`,
    );
  if (tile !== null && !(Number.isSafeInteger(tile) && tile >= 1))
    throw new UsageError(`prefill: a tile has at least one token, not ${tile}`);
  const size = tile ?? Number.POSITIVE_INFINITY;
  const results: Float32Array[] = new Array(prompts.length);
  for (let from = 0, left = true; left; from += size) {
    const rows = prompts.flatMap(({ length }, i) => (length > from ? [i] : []));
    left = rows.some((i) => prompts[i].length > from + size);
    const logits = readTokens(
      model,
      rows.map((i) => sequences[i]),
      rows.map((i) => prompts[i].slice(from, from + size)),
      options,
    );
    rows.forEach((row, i) => {
      results[row] = logits[i];
    });
  }
  return results;
}

function expectCache(model: LanguageModel, cache: DecodeCache): void {
  if (cache.device !== model.device) throw new UsageError('the DecodeCache is on another device than the model');
  if (cache.dtype !== model.dtype)
    throw new UsageError(`the DecodeCache holds ${cache.dtype}, but the model computes in ${model.dtype}`);
}

/** Scores of the next token of each context. Valid until the next call of `ContextReader.next`. */
export interface NextTokenScores {
  logits(): Float32Array[];
  /** The next tokens, if the device chose them; negative where the host must choose, as where a logit is not finite. */
  chosen?(): number[];
}

/** Reads contexts that grow from call to call, usually by one token. A context is identified by its array. */
export interface ContextReader {
  /**
   * `draws`: how the device draws the tokens, a row for each context (`sampleRows`); without it they are the most probable.
   * `goesOn`: each context is given the token that the device chooses, or is never read again. Without `draws` the step after
   * that token may then be launched before the token is known.
   */
  next(contexts: readonly (readonly number[])[], draws?: Float64Array | null, goesOn?: boolean): NextTokenScores;
  free(): void;
}

/** A step that the device computes before the caller has asked for it. */
interface StepAhead {
  readonly contexts: readonly (readonly number[])[];
  /** Waits for the tokens that it chooses. */
  readonly tokens: () => Int32Array;
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
  #ahead: StepAhead | null = null;

  constructor(model: LanguageModel, kernels: SparseOptions, tile: number | null, vocabulary: number) {
    this.#model = model;
    this.#kernels = kernels;
    this.#tile = tile;
    this.#cache = new DecodeCache(model.device, model.shape, model.dtype);
    this.#decoder = deviceDecoderRefusal(model) === null ? new DeviceDecoder(model, this.#cache, { vocabulary }) : null;
  }

  next(contexts: readonly (readonly number[])[], draws: Float64Array | null = null, goesOn = false): NextTokenScores {
    const sequences = contexts.map((context) => this.#sequence(context));
    const goesOnAhead = goesOn && draws === null;
    const ahead = this.#ahead;
    if (this.#decoder && ahead) return this.#take(this.#decoder, ahead, contexts, sequences, goesOnAhead);
    const fresh = contexts.map((context, i) => context.slice(sequences[i].length));
    const isStep = fresh.every(({ length }) => length === 1);
    if (isStep && this.#decoder?.hasRoom(sequences)) {
      const tokens = fresh.map(([token]) => token);
      this.#decoder.launch(sequences, tokens, draws);
      if (goesOnAhead && this.#decoder.hasRoom(sequences))
        return this.#launchAhead(this.#decoder, contexts, sequences, this.#decoder.nextLater());
      return chosenBy(this.#decoder);
    }
    const logits = isStep
      ? readTokens(this.#model, sequences, fresh, { kernels: this.#kernels })
      : this.#read(sequences, fresh);
    return { logits: () => logits };
  }

  free(): void {
    this.#ahead?.tokens(); // the device still computes
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

  /** The tokens of the step that was launched ahead, of which some contexts may have ended since. */
  #take(
    decoder: DeviceDecoder,
    { contexts: computed, tokens }: StepAhead,
    contexts: readonly (readonly number[])[],
    sequences: readonly CachedSequence[],
    goesOn: boolean,
  ): NextTokenScores {
    const rows = contexts.map((context) => computed.indexOf(context));
    if (rows.some((row, i) => row < 0 || contexts[i].length !== sequences[i].length))
      throw new Error('a context was not continued by the chosen token');
    this.#ahead = null;
    const isSame = contexts.length === computed.length && rows.every((row, i) => row === i);
    if (goesOn && isSame && decoder.hasRoom(sequences)) return this.#launchAhead(decoder, contexts, sequences, tokens);
    const { logits } = chosenBy(decoder);
    const ofRows = <T>(all: ArrayLike<T>) => rows.map((row) => all[row]);
    return { logits: () => ofRows(logits()), chosen: () => ofRows(tokens()) };
  }

  /** Launches the step after the one that chooses `tokens`; returns the scores of that one, whose logits are lost. */
  #launchAhead(
    decoder: DeviceDecoder,
    contexts: readonly (readonly number[])[],
    sequences: readonly CachedSequence[],
    tokens: () => Int32Array,
  ): NextTokenScores {
    const lengths = contexts.map(({ length }) => length);
    decoder.launch(sequences);
    this.#ahead = { contexts: [...contexts], tokens: decoder.nextLater() };
    const chosen = () => Array.from(tokens());
    const logits = () => {
      const row = chosen().findIndex((token) => token < 0);
      throw new UnusableLogits(`a logit of token ${lengths[row]} is not finite`);
    };
    return { logits, chosen };
  }

  #read(sequences: readonly CachedSequence[], fresh: readonly number[][]): Float32Array[] {
    const logits = prefill(this.#model, sequences, fresh, this.#tile, { kernels: this.#kernels });
    this.#model.device.pool.trim(); // a long prompt needs much more memory than the steps after it
    return logits;
  }
}

/** Scores of the step that was launched last. */
function chosenBy(decoder: DeviceDecoder): NextTokenScores {
  return { logits: () => decoder.logits(), chosen: () => Array.from(decoder.next()) };
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
