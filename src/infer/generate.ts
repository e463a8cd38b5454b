/**
 * Text from a model, token by token. Each token runs the model over the whole context again: no state between tokens,
 * which makes this the slow reference of the decode path. Positions are absolute and the context is never cut.
 */
import { setImmediate } from 'node:timers/promises';
import { UsageError } from '../errors.js';
import { kernelOptions } from '../model/kernels.js';
import type { LanguageModel } from '../model/language-model.js';
import type { SparseOptions } from '../ops/nsa.js';
import { sparseLayout } from '../ops/nsa.js';
import { Sequences } from '../ops/sequences.js';
import { Tape } from '../tensor/tape.js';
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

/** Yields pieces of text as they become certain; returns what was drawn and why it ended. */
export async function* generate(
  { model, tokenizer, config }: Pick<LoadedModel, 'model' | 'tokenizer' | 'config'>,
  prompt: string,
  { maxNewTokens = DEFAULT_NEW_TOKENS, maxContext = DEFAULT_MAX_CONTEXT, sampling, stop = [] }: GenerateOptions = {},
): AsyncGenerator<string, Generation, void> {
  expectWhole('max-new-tokens', maxNewTokens);
  expectWhole('max-context', maxContext);
  if (stop.includes('')) throw new UsageError('stop: an empty text would stop at once; give at least one character');
  const sample = createSampler(sampling);
  // Rows that no token has (a padded embedding) are never drawn.
  const vocabulary = Math.min(model.shape.vocab_size, tokenizer.vocabSize);
  const context = encodePrompt(prompt, tokenizer, vocabulary);
  const promptLength = context.length;
  if (promptLength >= maxContext)
    throw new UsageError(
      `the prompt has ${promptLength} tokens and max-context is ${maxContext}: ` +
        'shorten the prompt, or raise --max-context',
    );
  const decoder = tokenizer.createStreamDecoder();
  const filter = new StopFilter(stop);
  const kernels = kernelOptions(config);
  let trimmedAt = promptLength;
  let finishReason: FinishReason | null = null;
  while (finishReason === null) {
    const drawn = context.length - promptLength;
    const token = sample(lastLogits(model, context, kernels).subarray(0, vocabulary), drawn);
    // The pool keeps a block of every size class the growing context went through: give them back now and then.
    if (context.length > trimmedAt * 1.125) {
      model.device.pool.trim();
      trimmedAt = context.length;
    }
    await setImmediate(); // the model blocks; let output and signals through
    if (token === tokenizer.separator) {
      finishReason = 'separator';
      break;
    }
    context.push(token);
    const { text, stopped } = filter.push(decoder.push(token));
    if (text !== '') yield text;
    if (stopped) finishReason = 'stop';
    else if (drawn + 1 === maxNewTokens) finishReason = 'length';
    else if (context.length === maxContext) finishReason = 'context';
  }
  if (finishReason !== 'stop') {
    // A character whose last bytes were never drawn is left out rather than shown as a replacement character.
    const rest = filter.push(decoder.end().replace(/\uFFFD+$/, ''));
    const text = rest.stopped ? rest.text : rest.text + filter.end();
    if (text !== '') yield text;
    if (rest.stopped) finishReason = 'stop';
  }
  return { tokens: context.slice(promptLength), finishReason };
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
