/** Text generation: requests to an engine of their own. */
import { BatchEngine } from './engine/engine.js';
import { openPrefixes } from './engine/prefix/open.js';
import type { TextSource } from './text-source.js';
import {
  engineOptionsFor,
  type GenerateOptions,
  type Generation,
  generateWith,
  type TextPiece,
  textOfFirst,
} from './texts.js';

/** Yields pieces of text as they become final; returns the tokens and why the text ended. */
export function generate(
  source: TextSource,
  prompt: string | readonly number[],
  options: GenerateOptions = {},
): AsyncGenerator<string, Generation, void> {
  return textOfFirst(generateAll(source, [prompt], options));
}

/** Generates for several prompts, texts or token ids, as one batch. Each gets the text it would get alone. */
export function generateAll(
  source: TextSource,
  prompts: readonly (string | readonly number[])[],
  options: GenerateOptions = {},
): AsyncGenerator<TextPiece, Generation[], void> {
  return generateWith(() => ownEngine(source, options, prompts.length), source, prompts, options);
}

/** An engine for `count` texts at once. */
export function ownEngine(source: TextSource, options: GenerateOptions, count = 1): BatchEngine {
  return new BatchEngine(source, engineOptionsFor(source, options, count), false, openPrefixes);
}
