/**
 * Text from a model, token by token, on the decode cache; on a GPU a token is one replay of a graph. With the reference
 * kernels each token runs the model over the whole context again, which is the slow reference of the decode path. Positions
 * are absolute and the context is never cut.
 */
import { setImmediate } from 'node:timers/promises';
import { UsageError } from '../errors.js';
import { type ContextReader, contextReader } from './context-reader.js';
import { Draft, type FinishReason } from './draft.js';
import type { LoadedModel } from './load-model.js';
import { createSampler, isArgmax, type SamplingOptions } from './sampler.js';
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

export type { FinishReason };

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

/** A model and what its text is made of. */
export type Source = Pick<LoadedModel, 'model' | 'tokenizer' | 'config'>;

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
  const vocabulary = usedVocabulary({ model, tokenizer });
  const drafts = prompts.map((prompt, index) => {
    const context = encodePrompt(prompt, tokenizer, vocabulary);
    if (context.length >= maxContext) throw promptTooLong(context.length, maxContext);
    return new Draft(index, context, tokenizer.createStreamDecoder(), new StopFilter(stop));
  });
  const reader = contextReader(model, config, vocabulary);
  try {
    yield* writeDrafts(reader, drafts, { tokenizer, vocabulary, sampling, maxNewTokens, maxContext });
  } finally {
    reader.free();
  }
  return drafts.map(({ tokens, finishReason }) => ({ tokens, finishReason: finishReason ?? 'length' }));
}

/** Rows that no token has (a padded embedding) are never drawn. */
export function usedVocabulary({ model, tokenizer }: Pick<LoadedModel, 'model' | 'tokenizer'>): number {
  return Math.min(model.shape.vocabSize, tokenizer.vocabSize);
}

export interface WriteOptions {
  readonly tokenizer: LoadedModel['tokenizer'];
  readonly vocabulary: number;
  readonly sampling?: SamplingOptions | undefined;
  readonly maxNewTokens: number;
  readonly maxContext: number;
}

/** Draws token after token of all drafts until each is finished. */
export async function* writeDrafts(
  reader: ContextReader,
  drafts: readonly Draft[],
  { tokenizer, vocabulary, sampling, maxNewTokens, maxContext }: WriteOptions,
): AsyncGenerator<TextPiece, void, void> {
  const sample = createSampler(sampling);
  const isGreedy = isArgmax(sampling);
  for (let active = drafts; active.length > 0; active = active.filter(({ finishReason }) => finishReason === null)) {
    const following = reader.next(active.map(({ context }) => context));
    const best = isGreedy ? (following.best?.() ?? null) : null;
    // A device that finds no best token has found logits that are not sound: the sampler says what is wrong with them.
    const logits = best?.every((token) => token >= 0) ? null : following.logits();
    for (const [i, draft] of active.entries()) {
      const token = logits ? sample(logits[i].subarray(0, vocabulary), draft.drawn, draft.seen) : (best?.[i] ?? -1);
      const text = draft.add(token, token === tokenizer.separator, maxNewTokens, maxContext);
      if (text !== '') yield { index: draft.index, text };
    }
    await setImmediate(); // the model blocks; let output and signals through
  }
}

export function promptTooLong(length: number, maxContext: number): UsageError {
  return new UsageError(
    `the prompt has ${length} tokens and max-context is ${maxContext}: shorten the prompt, or raise --max-context`,
  );
}

export function encodePrompt(prompt: string, tokenizer: LoadedModel['tokenizer'], vocabulary: number): number[] {
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
