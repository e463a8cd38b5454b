/** The tokens of a prompt. */
import type { Tokenizer } from '../data/tokenizer.js';
import { UsageError } from '../errors.js';

/** The most tokens of a prompt and its text: `maxContext`, or `maxTokens` where memory holds fewer. */
export interface Room {
  readonly maxContext: number;
  readonly maxTokens: number;
}

export function longestText({ maxContext, maxTokens }: Room): number {
  return Math.min(maxContext, maxTokens);
}

/** `atLeast`: the prompt has that many tokens or more. */
function tooLong(length: number, room: Room, atLeast = false): string {
  const setting = room.maxTokens < room.maxContext ? 'cacheBytes (--cache-gb)' : 'maxContext (--max-context)';
  const count = atLeast ? `at least ${length}` : length;
  return `the prompt has ${count} tokens; at most ${longestText(room) - 1} fit: shorten the prompt, or raise ${setting}`;
}

export function promptTooLong(length: number, maxContext: number): UsageError {
  return new UsageError(tooLong(length, { maxContext, maxTokens: maxContext }));
}

/** Why a request can never be computed, and the setting that bounds it; null if it can. */
export function refusalOf(
  { length, atLeast = false, maxNewTokens }: { length: number; atLeast?: boolean; maxNewTokens: number },
  room: Room,
): { readonly message: string; readonly isPrompt: boolean } | null {
  const { maxContext, maxTokens } = room;
  if (length >= longestText(room)) return { message: tooLong(length, room, atLeast), isPrompt: true };
  // Beyond the context a text ends by length; memory for all of it is reserved before it starts.
  if (Math.min(maxContext, length + maxNewTokens) <= maxTokens) return null;
  const prompt = `the prompt has ${atLeast ? `at least ${length}` : length} tokens`;
  const remedy = 'ask for fewer tokens, or raise cacheBytes (--cache-gb)';
  const message = `${prompt} and may get ${maxNewTokens} more; memory holds ${maxTokens} together: ${remedy}`;
  return { message, isPrompt: false };
}

export function encodePrompt(prompt: string | readonly number[], tokenizer: Tokenizer, vocabulary: number): number[] {
  if (typeof prompt !== 'string') {
    if (prompt.length === 0) throw new UsageError('a prompt has no tokens; give at least one');
    expectInVocabulary(prompt, tokenizer, vocabulary);
    return [...prompt];
  }
  const { separator, documentStart = [] } = tokenizer;
  // A document begins after a separator, so an empty prompt starts there.
  const start = prompt === '' && documentStart.length === 0 ? [separator] : documentStart;
  const ids = [...start, ...tokenizer.encode(prompt, { parseSpecial: true })];
  expectInVocabulary(
    ids,
    tokenizer,
    vocabulary,
    prompt === '' ? 'the separator, which replaces an empty prompt,' : undefined,
  );
  return ids;
}

/** Refuses tokens that the model does not have. */
export function expectInVocabulary(
  ids: readonly number[],
  tokenizer: Tokenizer,
  vocabulary: number,
  where = 'the prompt',
): void {
  const unknown = ids.find((id) => id >= vocabulary);
  if (unknown === undefined) return;
  throw new UsageError(
    `${where} holds token ${unknown} of tokenizer ${tokenizer.name}, but the model has ${vocabulary} tokens: ` +
      'it was trained on synthetic tokens or another vocabulary and cannot continue this text',
  );
}
