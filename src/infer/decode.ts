/** Prefill and decode on a cache: logits of the token that follows each sequence. */
import type { Config } from '../config/schema.js';
import { UsageError } from '../errors.js';
import type { Observer } from '../model/attention.js';
import type { CachedSequence, DecodeCache } from '../model/cache.js';
import type { LanguageModel } from '../model/language-model.js';
import type { SparseOptions } from '../ops/attention/nsa.js';
import { Tape } from '../tensor/tape.js';

/** Options of `prefill` and `readTokens`. */
export interface DecodeOptions {
  readonly kernels?: SparseOptions;
  readonly observer?: Observer;
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
  { kernels, observer }: DecodeOptions = {},
): Float32Array[] {
  if (sequences.length === 0) throw new UsageError('readTokens: give at least one cached sequence');
  const [{ cache: owner }] = sequences;
  expectCache(model, owner);
  const cache = owner.begin(
    sequences,
    tokens.map(({ length }) => length),
  );
  const tape = new Tape(model.device, { record: false });
  try {
    const { total, starts } = cache.layout.tokens;
    const ids = tape.from(tokens.flat(), [total], 'i32');
    const last = Array.from(starts.subarray(1), (end) => end - 1);
    const options = { layout: cache.layout, cache, observer, ...(kernels ? { kernels } : {}) };
    const logits = model.logits(tape, ids, last, options).read() as Float32Array;
    cache.commit();
    const width = logits.length / sequences.length;
    return sequences.map((_, i) => logits.subarray(i * width, (i + 1) * width));
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
