/** What requests get: tokens are drawn, events are sent, and a request that ends gives its pages back. */
import type { FinishReason } from '../generate.js';
import { UnusableLogits } from '../sampler.js';
import { positionLogprobs } from './logprobs.js';
import type { PrefixCache } from './prefix-cache.js';
import type { Share, Slot } from './slot.js';

export interface AnswersOptions {
  /** Tokens below it can be drawn. */
  readonly vocabulary: number;
  readonly endTokens: readonly number[];
  readonly maxContext: number;
  readonly prefixes: PrefixCache | null;
  /** Called when the pages of a request were freed. */
  onFreed(slot: Slot): void;
}

export class Answers {
  /** Guessed tokens, and those of them that were right. */
  draftTokens = 0;
  acceptedTokens = 0;
  readonly #options: AnswersOptions;

  constructor(options: AnswersOptions) {
    this.#options = options;
  }

  /** The share's tokens were read; `next` is the most probable token after them, or the logits of its rows. */
  advance(share: Share, next: number | readonly Float32Array[]): void {
    const { slot, cached, tokens } = share;
    const { request } = slot;
    const hasPrompt = cached.length >= request.prompt.length;
    if (typeof next !== 'number' && request.promptLogprobs !== null && cached.length <= request.prompt.length)
      this.#addPromptLogprobs(slot, cached.length - tokens.length, next);
    // Without rows the end of the prompt was read after the answer began, with logits from a file.
    if (!hasPrompt || share.rows === 0) {
      if (slot.readAt === 0) this.progress(slot);
      return;
    }
    if (slot.readAt === 0) {
      const last = typeof next === 'number' ? undefined : next.at(-1);
      if (slot.name && slot.storesLogits && last)
        this.#options.prefixes?.keepLogits(
          slot.name,
          request.prompt.length,
          last.subarray(0, this.#options.vocabulary),
        );
      this.#endPrompt(slot, request.prompt.length);
    }
    if (request.maxNewTokens === 0) {
      this.end(slot, 'length');
      return;
    }
    this.#orRelease(slot, () => {
      if (typeof next !== 'number') this.#drawShare(share, next.slice(-1 - share.drafts));
      else if (next >= 0) this.#accept(slot, next, null);
      else throw new UnusableLogits(`a logit of token ${cached.length} is not finite`);
    });
  }

  /** The logits after the prompt are known before its pages are there. */
  beginWith(slot: Slot, logits: Float32Array): void {
    slot.storesLogits = false;
    slot.cachedTokens = slot.request.prompt.length;
    this.#endPrompt(slot, slot.cachedTokens);
    if (slot.request.maxNewTokens === 0) this.end(slot, 'length');
    else this.#orRelease(slot, () => this.#draw(slot, logits));
  }

  /** The prompt is read, or what follows it is known. */
  #endPrompt(slot: Slot, processed: number): void {
    slot.readAt = performance.now();
    this.progress(slot, processed);
    slot.sink.push({ type: 'prompt', logprobs: slot.promptLogprobs });
  }

  /** Logits that are not finite end their request, not the engine. */
  #orRelease(slot: Slot, work: () => void): void {
    try {
      work();
    } catch (error) {
      this.release(slot, error);
    }
  }

  #addPromptLogprobs({ request, promptLogprobs }: Slot, first: number, logits: readonly Float32Array[]): void {
    for (const [i, row] of logits.entries()) {
      const next = request.prompt[first + i + 1];
      if (next !== undefined)
        promptLogprobs.push(positionLogprobs(row, next, request.promptLogprobs ?? 0, this.#options.vocabulary));
    }
  }

  /** Draws a token after the last certain one, and after every draft while the drafts are what was drawn. */
  #drawShare({ slot, cached, tokens, drafts }: Share, logits: readonly Float32Array[]): void {
    const { context } = slot.sequence;
    const certain = tokens.length - drafts;
    let accepted = 0;
    for (const [i, row] of logits.entries()) {
      this.#draw(slot, row);
      if (slot.cached === null || i === drafts || context[context.length - 1] !== tokens[certain + i]) break;
      accepted += 1;
    }
    if (drafts === 0) return;
    this.draftTokens += drafts;
    this.acceptedTokens += accepted;
    slot.lookup?.checked(drafts, accepted);
    if (slot.cached) cached.truncate(context.length - 1);
  }

  #draw(slot: Slot, logits: Float32Array): void {
    const { request, sequence, mask } = slot;
    const isEarly = sequence.drawn < request.minNewTokens;
    let candidates = logits.subarray(0, this.#options.vocabulary);
    if (mask || isEarly) {
      candidates = candidates.slice();
      mask?.apply(candidates);
      if (isEarly) for (const token of this.#options.endTokens) candidates[token] = Number.NEGATIVE_INFINITY;
    }
    let token = request.sample(candidates, sequence.drawn, sequence.seen);
    if (mask?.narrow?.(token, candidates)) token = request.sample(candidates, sequence.drawn, sequence.seen);
    this.#accept(slot, token, logits);
  }

  /** The next token of a request is `token`. */
  #accept(slot: Slot, token: number, logits: Float32Array | null): void {
    const { request, sequence, mask, sink } = slot;
    mask?.accept(token);
    const isEnd = this.#options.endTokens.includes(token) && !request.ignoreSeparator;
    let text = sequence.add(token, isEnd, request.maxNewTokens, this.#options.maxContext);
    if (mask?.isComplete || (isEnd && mask?.isCut)) text += sequence.complete(mask.isCut ?? false);
    if (isEnd) {
      this.end(slot, 'separator', text);
      return;
    }
    const logprobs =
      request.logprobs === null || logits === null
        ? {}
        : { logprobs: positionLogprobs(logits, token, request.logprobs, this.#options.vocabulary) };
    sink.push({ type: 'token', token, text, ...logprobs });
    if (sequence.finishReason !== null) this.end(slot, sequence.finishReason, '');
  }

  /** Tells how much of the prompt is read. */
  progress({ request, cached, cachedTokens, sink }: Slot, processed = cached?.length ?? 0): void {
    sink.push({ type: 'progress', total: request.prompt.length, cached: cachedTokens, processed });
  }

  /** `text`: the last text, if the sequence has already finished. */
  end(slot: Slot, reason: FinishReason, text = slot.sequence.finish(reason)): void {
    const now = performance.now();
    const { request, sequence, submittedAt, cachedTokens } = slot;
    const startedAt = slot.startedAt || now;
    const readAt = slot.readAt || now;
    const usage = {
      promptTokens: request.prompt.length,
      cachedTokens,
      newTokens: sequence.drawn,
      queueSeconds: (startedAt - submittedAt) / 1000,
      prefillSeconds: (readAt - startedAt) / 1000,
      decodeSeconds: (now - readAt) / 1000,
    };
    slot.sink.push({ type: 'end', text, finishReason: sequence.finishReason ?? reason, usage });
    this.release(slot);
  }

  /** Frees the pages of a request, which gets no more events. */
  release(slot: Slot, error: unknown = null): void {
    if (slot.cached) {
      slot.cached.free();
      slot.cached = null;
      this.#options.onFreed(slot);
    }
    slot.sink.end(error);
  }
}
