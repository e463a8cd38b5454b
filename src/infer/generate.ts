/**
 * Text from a model, token by token, on the decode cache. Where there is none (CUDA, the reference kernels) each token runs
 * the model over the whole context again, which is the slow reference of the decode path. Positions are absolute and the
 * context is never cut.
 */
import { setImmediate } from 'node:timers/promises';
import type { Config } from '../config/schema.js';
import { UsageError } from '../errors.js';
import { type CachedSequence, cacheRefusal, DecodeCache } from '../model/cache.js';
import { kernelOptions } from '../model/kernels.js';
import type { LanguageModel } from '../model/language-model.js';
import type { SparseOptions } from '../ops/nsa.js';
import { sparseLayout } from '../ops/nsa.js';
import { Sequences } from '../ops/sequences.js';
import { Tape } from '../tensor/tape.js';
import { prefill, prefillTile, readTokens } from './decode.js';
import type { LoadedModel } from './load-model.js';
import { createSampler, type SamplingOptions } from './sampler.js';
import { StopFilter } from './stop.js';

export interface GenerateOptions {
  /** Default 128. */
  readonly maxNewTokens?: number;
  /** Most tokens in the context, the prompt included; default 32,768. */
  readonly maxContext?: number;
  readonly sampling?: SamplingOptions;
  /** Texts that end the output; they are no part of it. */
  readonly stop?: readonly string[];
}

/** `separator`: the model ended its document. `context`: the context is full. */
export type FinishReason = 'separator' | 'stop' | 'length' | 'context';

export interface Generation {
  /** What was drawn, without the separator. */
  readonly tokens: readonly number[];
  readonly finishReason: FinishReason;
}

/** Memory and time of a token grow with the context; nobody reaches this by accident and waits for it. */
export const DEFAULT_MAX_CONTEXT = 32_768;

export const DEFAULT_NEW_TOKENS = 128;

/** A piece of the text of prompt number `index`. */
export interface TextPiece {
  readonly index: number;
  readonly text: string;
}

type Source = Pick<LoadedModel, 'model' | 'tokenizer' | 'config'>;

/** Yields pieces of text as they become certain; returns what was drawn and why it ended. */
export async function* generate(
  source: Source,
  prompt: string,
  options: GenerateOptions = {},
): AsyncGenerator<string, Generation, void> {
  const stream = generateAll(source, [prompt], options);
  try {
    for (;;) {
      const { done, value } = await stream.next();
      if (done) return value[0];
      yield value.text;
    }
  } finally {
    await stream.return([]);
  }
}

/** Several prompts side by side, each with the text it would have alone. */
export async function* generateAll(
  { model, tokenizer, config }: Source,
  prompts: readonly string[],
  { maxNewTokens = DEFAULT_NEW_TOKENS, maxContext = DEFAULT_MAX_CONTEXT, sampling, stop = [] }: GenerateOptions = {},
): AsyncGenerator<TextPiece, Generation[], void> {
  expectWhole('max-new-tokens', maxNewTokens);
  expectWhole('max-context', maxContext);
  if (stop.includes('')) throw new UsageError('stop: an empty text would stop at once; give at least one character');
  const sample = createSampler(sampling);
  // Rows that no token has (a padded embedding) are never drawn.
  const vocabulary = Math.min(model.shape.vocab_size, tokenizer.vocabSize);
  const drafts = prompts.map((prompt, index) => {
    const context = encodePrompt(prompt, tokenizer, vocabulary);
    if (context.length >= maxContext)
      throw new UsageError(
        `the prompt has ${context.length} tokens and max-context is ${maxContext}: ` +
          'shorten the prompt, or raise --max-context',
      );
    return new Draft(index, context, tokenizer.createStreamDecoder(), new StopFilter(stop));
  });
  const reader = contextReader(model, config);
  try {
    for (let active = drafts; active.length > 0; active = active.filter(({ finishReason }) => finishReason === null)) {
      const logits = reader.next(active.map(({ context }) => context));
      for (const [i, draft] of active.entries()) {
        const token = sample(logits[i].subarray(0, vocabulary), draft.drawn, draft.seen);
        const text = draft.add(token, token === tokenizer.separator, maxNewTokens, maxContext);
        if (text !== '') yield { index: draft.index, text };
      }
      await setImmediate(); // the model blocks; let output and signals through
    }
  } finally {
    reader.free();
  }
  return drafts.map(({ tokens, finishReason }) => ({ tokens, finishReason: finishReason ?? 'length' }));
}

/** One prompt and what was drawn after it. */
class Draft {
  readonly index: number;
  /** The prompt and the text so far. */
  readonly context: number[];
  /** Its tokens, each once. */
  readonly seen: Set<number>;
  finishReason: FinishReason | null = null;
  readonly #promptLength: number;
  readonly #decoder: ReturnType<LoadedModel['tokenizer']['createStreamDecoder']>;
  readonly #filter: StopFilter;

  constructor(
    index: number,
    context: number[],
    decoder: ReturnType<LoadedModel['tokenizer']['createStreamDecoder']>,
    filter: StopFilter,
  ) {
    this.index = index;
    this.context = context;
    this.seen = new Set(context);
    this.#promptLength = context.length;
    this.#decoder = decoder;
    this.#filter = filter;
  }

  get drawn(): number {
    return this.context.length - this.#promptLength;
  }

  get tokens(): number[] {
    return this.context.slice(this.#promptLength);
  }

  /** Takes the next token; returns the text that is certain now. */
  add(token: number, isSeparator: boolean, maxNewTokens: number, maxContext: number): string {
    if (isSeparator) {
      this.finishReason = 'separator';
      return this.#rest();
    }
    this.context.push(token);
    this.seen.add(token);
    const { text, stopped } = this.#filter.push(this.#decoder.push(token));
    if (stopped) {
      this.finishReason = 'stop';
      return text;
    }
    if (this.drawn === maxNewTokens) this.finishReason = 'length';
    else if (this.context.length === maxContext) this.finishReason = 'context';
    return this.finishReason === null ? text : text + this.#rest();
  }

  #rest(): string {
    // A character whose last bytes were never drawn is left out rather than shown as a replacement character.
    const rest = this.#filter.push(this.#decoder.end().replace(/\uFFFD+$/, ''));
    if (!rest.stopped) return rest.text + this.#filter.end();
    this.finishReason = 'stop';
    return rest.text;
  }
}

/** Logits of what follows each of some contexts, which grow by one token from call to call and may drop out. */
interface ContextReader {
  next(contexts: readonly (readonly number[])[]): Float32Array[];
  free(): void;
}

function contextReader(model: LanguageModel, config: Config): ContextReader {
  const kernels = kernelOptions(config);
  // The reference computes whole sequences only.
  const isCached = cacheRefusal(model.device) === null && !kernels.parity && kernels.kernel !== 'reference';
  return isCached ? cachedReader(model, kernels, prefillTile(config)) : slowReader(model, kernels);
}

function cachedReader(model: LanguageModel, kernels: SparseOptions, tile: number | null): ContextReader {
  const cache = new DecodeCache(model.device, model.shape);
  const held = new Map<readonly number[], CachedSequence>();
  return {
    next(contexts) {
      if (held.size > 0) {
        const sequences = contexts.map((context) => held.get(context) as CachedSequence);
        const tokens = contexts.map((context, i) => context.slice(sequences[i].length));
        return readTokens(model, sequences, tokens, { kernels });
      }
      for (const context of contexts) held.set(context, cache.sequence());
      const logits = prefill(model, [...held.values()], contexts, tile, { kernels });
      model.device.pool.trim(); // a long prompt takes much more memory than any step after it
      return logits;
    },
    free() {
      for (const sequence of held.values()) sequence.free();
    },
  };
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
      return contexts.map((context) => lastLogits(model, context, kernels));
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

function encodePrompt(prompt: string, tokenizer: LoadedModel['tokenizer'], vocabulary: number): number[] {
  // A document begins after a separator: with nothing said, that is where the model starts.
  const ids = prompt === '' ? [tokenizer.separator] : Array.from(tokenizer.encode(prompt));
  const unknown = ids.find((id) => id >= vocabulary);
  if (unknown === undefined) return ids;
  const where = prompt === '' ? 'the separator, which stands for an empty prompt,' : 'the prompt';
  throw new UsageError(
    `${where} holds token ${unknown} of tokenizer ${tokenizer.name}, but the model has ${vocabulary} tokens: ` +
      'it was trained on synthetic tokens or another vocabulary and cannot continue this text',
  );
}

function expectWhole(name: string, value: number): void {
  if (!Number.isSafeInteger(value) || value < 1)
    throw new UsageError(`${name}: ${value} is not allowed; a whole number from 1`);
}
