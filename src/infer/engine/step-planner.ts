/** Which tokens the next step reads: one of every request that generates, and a tile of prompts. */
import type { CachedSequence } from '../../model/cache.js';
import type { PrefixCache } from './prefix-cache.js';
import type { CheckedRequest } from './request.js';
import type { Share, Slot } from './slot.js';

/** What bounds a step. */
export interface StepLimits {
  readonly prefixes: PrefixCache | null;
  /** Tokens of prompts that a step reads, and those while no request generates. */
  readonly tile: number;
  readonly idleTile: number;
  readonly maxContext: number;
}

export class StepPlanner {
  readonly #limits: StepLimits;

  constructor(limits: StepLimits) {
    this.#limits = limits;
  }

  /**
   * A token of every request that generates, and at most `tile` tokens of prompts, or `idleTile` if none generates, the oldest
   * request first.
   */
  plan(running: readonly Slot[]): Share[] {
    const isGenerating = running.some(({ readAt }) => readAt > 0);
    let left = this.#limits[isGenerating ? 'tile' : 'idleTile'];
    const shares: Share[] = [];
    for (const slot of running) {
      if (left > 0) this.#lookAgain(slot);
      const { cached, request, sequence } = slot;
      if (!cached || slot.isLoading) continue;
      const unread = sequence.context.length - cached.length;
      const isPrompt = cached.length < request.prompt.length;
      const count = isPrompt ? this.#untilKept(slot, cached, left) : 1;
      if (count === 0 || (isPrompt && isRead(slot, cached, shares))) continue;
      if (isPrompt) left -= count;
      const isLast = count === unread;
      const wantsAll = isPrompt && request.promptLogprobs !== null;
      const tokens = sequence.context.slice(cached.length, cached.length + count);
      const draft = isPrompt ? [] : this.#draft(slot, cached, left);
      left -= draft.length;
      const rows = wantsAll ? count : isLast ? 1 + draft.length : 0;
      shares.push({ slot, cached, tokens: [...tokens, ...draft], drafts: draft.length, rows });
    }
    return shares;
  }

  /** Other requests may have read the beginning of a prompt since it was looked up in the prefix cache. */
  #lookAgain(slot: Slot): void {
    const { cached, name, request, cachedTokens } = slot;
    const isUnread = cached && cached.length === cachedTokens && slot.readAt === 0 && !slot.isLoading;
    if (!isUnread || !name || request.promptLogprobs !== null) return;
    const longer = this.#limits.prefixes?.longer(name, request.prompt.length, cached.length);
    if (!longer) return;
    cached.free();
    slot.cached = longer;
    slot.cachedTokens = longer.length;
  }

  /** At most `most` tokens of a prompt, up to a length at which it is kept or to its end. */
  #untilKept({ request, sequence }: Slot, { length }: CachedSequence, most: number): number {
    const isEndKept = length < request.prompt.length - 1 && this.keepsEnd(request);
    const end = isEndKept ? request.prompt.length - 1 : sequence.context.length;
    const count = Math.min(end - length, most);
    return this.#limits.prefixes?.untilKept(length, count) ?? count;
  }

  /** Whether the end of the prompt is kept in the prefix cache; then its last token is read in a pass of its own. */
  keepsEnd({ prompt, promptLogprobs }: CheckedRequest): boolean {
    return promptLogprobs === null && (this.#limits.prefixes?.keepsEnd(prompt.length) ?? false);
  }

  /** Guesses for the tokens after the next one; fewer than `left`. */
  #draft({ lookup, request, sequence }: Slot, { length }: CachedSequence, left: number): number[] {
    if (!lookup) return [];
    const { context, drawn } = sequence;
    const unwritten = Math.min(request.maxNewTokens - drawn, this.#limits.maxContext - context.length);
    // The last token of a block is read without drafts, so that the prefix cache keeps no rows of drafts.
    const room = (this.#limits.prefixes?.untilBlock(length) ?? Number.POSITIVE_INFINITY) - 2;
    return lookup.next(Math.min(unwritten - 1, left - 1, room));
  }
}

/** Whether a request of this step reads what this one would read next, and keeps it in the prefix cache. */
function isRead({ name, request }: Slot, { length }: CachedSequence, shares: readonly Share[]): boolean {
  if (!name || request.promptLogprobs !== null) return false;
  return shares.some(({ slot, cached, tokens }) => {
    const end = length + tokens.length;
    return cached.length === length && end < request.prompt.length && slot.name?.isSame(name, end);
  });
}
