/** Which tokens the next step reads: one of every text that is being written, and a tile of prompts. */
import type { CachedSequence } from '../../model/cache.js';
import type { PrefixCache } from './prefix/cache.js';
import type { CheckedRequest } from './request.js';
import type { Sequence } from './sequence.js';

/** The tokens that a step reads of one sequence. */
export interface Share {
  readonly sequence: Sequence;
  readonly pages: CachedSequence;
  readonly tokens: readonly number[];
  /** Number of its last tokens that are guesses. */
  readonly drafts: number;
  /** Number of its last tokens whose logits are needed. */
  readonly rows: number;
}

/** Limits of a step. */
export interface StepLimits {
  readonly prefixes: PrefixCache | null;
  /** Tokens of prompts that a step reads, and those while no text is written. */
  readonly tile: number;
  readonly idleTile: number;
  readonly maxContext: number;
}

export class Scheduler {
  readonly #limits: StepLimits;

  constructor(limits: StepLimits) {
    this.#limits = limits;
  }

  /**
   * A token of every text that is being written, and at most `tile` tokens of prompts, or `idleTile` if none is, the oldest
   * request first.
   */
  plan(running: readonly Sequence[]): Share[] {
    let left = this.#limits[running.some(({ isWriting }) => isWriting) ? 'tile' : 'idleTile'];
    const shares: Share[] = [];
    for (const sequence of running) {
      if (left > 0) this.#lookAgain(sequence);
      const { pages, request, context } = sequence;
      if (!pages || sequence.isLoading) continue;
      const unread = context.length - pages.length;
      const isPrompt = pages.length < request.prompt.length;
      const count = isPrompt ? this.#untilKept(sequence, pages, left) : 1;
      if (count === 0 || (isPrompt && isRead(sequence, pages, shares))) continue;
      if (isPrompt) left -= count;
      const isLast = count === unread;
      const wantsAll = isPrompt && request.promptLogprobs !== null;
      const tokens = context.slice(pages.length, pages.length + count);
      const guess = isPrompt ? [] : this.#guess(sequence, pages, left);
      left -= guess.length;
      const rows = wantsAll ? count : isLast ? 1 + guess.length : 0;
      shares.push({ sequence, pages, tokens: [...tokens, ...guess], drafts: guess.length, rows });
    }
    return shares;
  }

  /** Other requests may have read the beginning of a prompt since it was looked up in the prefix cache. */
  #lookAgain(sequence: Sequence): void {
    const { pages, keys, request, cachedTokens } = sequence;
    const isUnread = pages && pages.length === cachedTokens && !sequence.isWriting && !sequence.isLoading;
    if (!isUnread || !keys || request.promptLogprobs !== null) return;
    const longer = this.#limits.prefixes?.longer(keys, request.prompt.length, pages.length);
    if (longer) sequence.continueFrom(longer);
  }

  /** At most `most` tokens of a prompt, up to a length at which it is kept or to its end. */
  #untilKept({ request, context }: Sequence, { length }: CachedSequence, most: number): number {
    const isEndKept = length < request.prompt.length - 1 && this.keepsEnd(request);
    const end = isEndKept ? request.prompt.length - 1 : context.length;
    const count = Math.min(end - length, most);
    return this.#limits.prefixes?.untilKept(length, count) ?? count;
  }

  /** Whether the end of the prompt is kept in the prefix cache; then its last token is read in a pass of its own. */
  keepsEnd({ prompt, promptLogprobs }: CheckedRequest): boolean {
    return promptLogprobs === null && (this.#limits.prefixes?.keepsEnd(prompt.length) ?? false);
  }

  /** Guesses for the tokens after the next one; fewer than `left`. */
  #guess({ drafts, request, context, drawn }: Sequence, { length }: CachedSequence, left: number): number[] {
    if (!drafts) return [];
    const unwritten = Math.min(request.maxNewTokens - drawn, this.#limits.maxContext - context.length);
    // The last token of a block is read without guesses, so that the prefix cache keeps no rows of guesses.
    const room = (this.#limits.prefixes?.untilBlock(length) ?? Number.POSITIVE_INFINITY) - 2;
    return drafts.next(Math.min(unwritten - 1, left - 1, room));
  }
}

/** Whether a sequence of this step reads what this one would read next, and keeps it in the prefix cache. */
function isRead({ keys, request }: Sequence, { length }: CachedSequence, shares: readonly Share[]): boolean {
  if (!keys || request.promptLogprobs !== null) return false;
  return shares.some(({ sequence, pages, tokens }) => {
    const end = length + tokens.length;
    return pages.length === length && end < request.prompt.length && sequence.keys?.isSame(keys, end);
  });
}
