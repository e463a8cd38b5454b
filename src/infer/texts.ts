/**
 * Texts of an engine that computes a step whenever the next text is asked for. Without files, so that pages in a browser use
 * it too; generate.ts opens the engine in Node.
 */
import { UsageError } from '../errors.js';
import { prefillTile } from './decode.js';
import type { BatchEngine } from './engine/engine.js';
import type { EngineOptions, EventSink } from './engine/interface.js';
import {
  DEFAULT_MAX_CONTEXT,
  DEFAULT_NEW_TOKENS,
  type EngineEvent,
  type EngineRequest,
  type FinishReason,
} from './engine/request.js';
import type { KeptPages } from './engine/sequence.js';
import { encodePrompt, promptTooLong } from './prompt.js';
import { type TextSource, usedVocabulary } from './text-source.js';

/** Options of `generate` and `generateAll`. */
export interface GenerateOptions
  extends Pick<EngineRequest, 'maxNewTokens' | 'sampling' | 'stop' | 'responseFormat'>,
    Pick<EngineOptions, 'maxContext' | 'prefixCacheDir' | 'speculate'> {
  /** An AbortSignal: once aborted, generation ends before the next token with the finish reason `aborted`. */
  readonly signal?: { readonly aborted: boolean } | undefined;
}

/** The result of one prompt. */
export interface Generation {
  /** The drawn tokens, without the one that ended the text. */
  readonly tokens: readonly number[];
  readonly finishReason: FinishReason;
}

/** A piece of the text of prompt `index`. */
export interface TextPiece {
  readonly index: number;
  readonly text: string;
}

/** Generates for several prompts with an engine that `open` makes, and closes it. */
export async function* generateWith(
  open: () => BatchEngine,
  source: TextSource,
  prompts: readonly (string | readonly number[])[],
  options: GenerateOptions,
): AsyncGenerator<TextPiece, Generation[], void> {
  const { maxContext = DEFAULT_MAX_CONTEXT } = options;
  const engine = open();
  try {
    const texts = prompts.map((prompt) => {
      const tokens = encodePrompt(prompt, source.tokenizer, usedVocabulary(source));
      if (tokens.length >= maxContext) throw promptTooLong(tokens.length, maxContext);
      return new GeneratedText(engine, tokens, options);
    });
    yield* advance(engine, texts, options);
    return texts.map(({ tokens, finishReason }) => ({ tokens, finishReason: finishReason ?? 'length' }));
  } finally {
    await engine.close();
  }
}

/** The text of the first prompt alone. */
export async function* textOfFirst(
  stream: AsyncGenerator<TextPiece, Generation[], void>,
): AsyncGenerator<string, Generation, void> {
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

/** Options of an engine for `count` texts at once. Its memory grows with them, and it keeps prefixes only if told where. */
export function engineOptionsFor(source: TextSource, options: GenerateOptions, count: number): EngineOptions {
  const { maxNewTokens = DEFAULT_NEW_TOKENS, maxContext = DEFAULT_MAX_CONTEXT, prefixCacheDir, speculate } = options;
  expectPositiveInteger('max-new-tokens', maxNewTokens);
  expectPositiveInteger('max-context', maxContext);
  // Prompts are read whole, unless they are kept: then in the tiles of a server, whose files are the same.
  const tile = prefillTile(source.config) ?? (prefixCacheDir === undefined ? Number.MAX_SAFE_INTEGER : undefined);
  const unlimited = { cacheBytes: Number.POSITIVE_INFINITY, maxQueuedTokens: Number.POSITIVE_INFINITY };
  return {
    maxBatch: Math.max(1, count),
    maxContext,
    ...unlimited,
    ...(tile !== undefined && { tile, idleTile: tile }),
    ...(prefixCacheDir === undefined ? { prefixCacheBytes: 0 } : { prefixCacheDir }),
    ...(speculate !== undefined && { speculate }),
  };
}

/** One text of an engine: what of it is not yielded yet, its tokens, and why it ended. */
export class GeneratedText implements EventSink {
  readonly tokens: number[] = [];
  finishReason: FinishReason | null = null;
  isEnded = false;
  #text = '';
  #error: unknown = null;

  /** Submits the request. */
  constructor(engine: BatchEngine, prompt: readonly number[], options: GenerateOptions, kept: KeptPages | null = null) {
    const { signal: _, ...request } = options;
    engine.listen({ ...request, prompt }, this, kept);
  }

  push(event: EngineEvent): void {
    if (event.type === 'token') this.tokens.push(event.token);
    if (event.type === 'token' || event.type === 'end') this.#text += event.text;
    if (event.type === 'end') this.finishReason = event.finishReason;
  }

  end(error: unknown): void {
    this.isEnded = true;
    this.#error = error;
  }

  /** The text since the last call. Throws what ended the request. */
  next(): string {
    const text = this.#text;
    this.#text = '';
    if (this.#error) throw this.#error;
    return text;
  }
}

/** Yields pieces of text until all texts have ended. */
export async function* advance(
  engine: BatchEngine,
  texts: readonly GeneratedText[],
  { signal }: GenerateOptions,
): AsyncGenerator<TextPiece, void, void> {
  while (texts.some(({ isEnded }) => !isEnded)) {
    if (signal?.aborted) engine.cancel();
    await engine.advance();
    for (const [index, each] of texts.entries()) {
      const text = each.next();
      if (text !== '') yield { index, text };
    }
  }
}

function expectPositiveInteger(name: string, value: number): void {
  if (!Number.isSafeInteger(value) || value < 1)
    throw new UsageError(`${name}: ${value} is not allowed; use an integer of at least 1`);
}
