/** Reading tokens with a model: prefill and decode on a cache, and without a cache the whole context again. */
import type { Config } from '../config/schema.js';
import { UsageError } from '../errors.js';
import type { Observer } from '../model/attention.js';
import type { CachedSequence, DecodeCache } from '../model/cache.js';
import type { LanguageModel } from '../model/language-model.js';
import type { SparseOptions } from '../ops/attention/nsa.js';
import { Tape } from '../tensor/tape.js';

/** Options of reading tokens. */
export interface ReadOptions {
  readonly kernels?: SparseOptions;
  readonly observer?: Observer;
  /** Number of last tokens of each sequence that `CachedSequence.truncate` may take back. Default 0. */
  readonly drafts?: readonly number[];
}

/** How a prompt is read: `tokens` at a time, all of it when null. */
export function prefillTile({ runtime }: Pick<Config, 'runtime'>): number | null {
  return runtime.prefill_tile === 0 ? null : runtime.prefill_tile;
}

/** Reads new tokens, at least one for each sequence, in one pass; returns the logits after the last of each. */
export function readTokens(
  model: LanguageModel,
  sequences: readonly CachedSequence[],
  tokens: readonly (readonly number[])[],
  options: ReadOptions = {},
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
    const ids = tape.from(tokens.flat(), [cache.tokens.sequences.total], 'i32');
    const options = { lengths: cache.tokens.sequences, cache, observer, ...(kernels ? { kernels } : {}) };
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
  options: ReadOptions = {},
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

/** Logits of the token that follows `context`, by one pass over all of it: the slow reference of decoding. */
export function lastLogits(
  model: LanguageModel,
  context: readonly number[],
  kernels: SparseOptions = {},
): Float32Array {
  const { device } = model;
  const tape = new Tape(device, { record: false });
  try {
    const ids = tape.from(context, [context.length], 'i32');
    const logits = model.logits(tape, ids, [context.length - 1], { lengths: [context.length], kernels });
    return Float32Array.from(logits.read());
  } finally {
    tape.end();
  }
}
