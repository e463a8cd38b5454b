/**
 * Computes the tokens that a step reads. On a GPU the tokens of requests that generate go through the device decoder, which
 * draws the next ones where it can; everything else is one pass of the model.
 */
import type { LanguageModel } from '../../model/language-model.js';
import type { SparseOptions } from '../../ops/attention/nsa.js';
import { readRows } from '../decode.js';
import type { DeviceDecoder } from '../device-decoder.js';
import type { Answers } from './answers.js';
import { drawSettings } from './device-steps.js';
import type { PrefixCache } from './prefix-cache.js';
import type { Share } from './slot.js';
import type { StepPlanner } from './step-planner.js';

export interface StepRunnerOptions {
  readonly model: LanguageModel;
  readonly kernels: SparseOptions;
  /** Null where the host draws every token. */
  readonly decoder: DeviceDecoder | null;
  readonly prefixes: PrefixCache | null;
  readonly planner: StepPlanner;
  readonly answers: Answers;
  readonly endTokens: readonly number[];
  readonly maxContext: number;
  readonly tile: number;
}

export class StepRunner {
  readonly #options: StepRunnerOptions;
  /** Steps that the GPU computes now and whose tokens were not read yet, the oldest first; at most two. */
  readonly #inFlight: { readonly shares: readonly Share[]; readonly tokens: () => Int32Array }[] = [];

  constructor(options: StepRunnerOptions) {
    this.#options = options;
  }

  /** The shares of the step that the GPU computes and the next call of `run` completes; null if no step is in flight. */
  get launched(): readonly Share[] | null {
    return this.#inFlight[0]?.shares ?? null;
  }

  /** Forgets what is being computed. */
  clear(): void {
    this.#inFlight.length = 0;
  }

  /** Computes a step, or the rest of the one that was `launched`. `requests`: how many run and wait. */
  run(shares: readonly Share[], requests: number): void {
    const isLaunched = this.#inFlight.length > 0;
    // On a GPU the tokens of requests that generate go first, and do not wait for a tile of a prompt.
    const single = shares.filter(({ tokens }) => tokens.length === 1);
    const decoder = isLaunched ? this.#options.decoder : this.#decoderFor(single);
    if (decoder) this.#decode(decoder, single, requests);
    const others = decoder ? shares.filter(({ tokens }) => tokens.length > 1) : shares;
    if (others.length > 0) this.#read(others);
  }

  /** The decoder, if it can read the shares, of one token each. */
  #decoderFor(shares: readonly Share[]): DeviceDecoder | null {
    const { decoder } = this.#options;
    if (!decoder || shares.length === 0) return null;
    return decoder.hasRoom(shares.map(({ cached }) => cached)) ? decoder : null;
  }

  /**
   * One token of every share on the GPU, which also draws the next ones where it can. Then nothing but these tokens is read
   * back, and the next step is launched before the host deals with them, or even before it has them: the row of a request
   * that ends meanwhile is wasted.
   */
  #decode(decoder: DeviceDecoder, shares: readonly Share[], requests: number): void {
    if (this.#inFlight.length === 0) this.#launch(decoder, shares, 0);
    const isAhead = requests === shares.length && this.#goesOnAnyway(decoder, shares);
    if (isAhead) {
      for (const share of shares) this.#keep(share);
      this.#launch(decoder, shares, 1);
    }
    const best = this.#inFlight.shift()?.tokens() ?? decoder.next();
    const logits: (Float32Array | null)[] = [];
    let allGoOn = !isAhead && requests === shares.length;
    for (const [i, share] of shares.entries()) {
      logits.push(null);
      // A request may have ended while its next token was computed.
      if (share.slot.cached === null) allGoOn = false;
      else if (!isAhead && (best[i] < 0 || this.#needsLogits(share))) logits[i] = decoder.logitsOf(i);
      if (logits[i] !== null || !this.#goesOn(share, best[i])) allGoOn = false;
      if (share.slot.cached !== null && !isAhead) this.#keep(share);
    }
    // Until the next launch the GPU waits: what can be done after it is done after it.
    if (allGoOn && decoder.hasRoom(shares.map(({ cached }) => cached))) this.#launch(decoder, shares, 1);
    for (const [i, share] of shares.entries())
      if (share.slot.cached !== null) this.#options.answers.advance(share, logits[i] === null ? best[i] : [logits[i]]);
  }

  /** Launches the step of the shares' tokens, or with `ahead` 1 of the tokens that follow them on the device. */
  #launch(decoder: DeviceDecoder, shares: readonly Share[], ahead: 0 | 1): void {
    decoder.launch(
      shares.map(({ cached }) => cached),
      ahead === 0 ? shares.map(({ tokens }) => tokens[0]) : null,
      drawSettings(shares, ahead),
    );
    this.#inFlight.push({ shares, tokens: decoder.nextLater() });
    decoder.reserveAhead((i) => this.#roomAhead(shares[i]));
  }

  /** Tokens for which the request has memory, up to the next length at which a fork of its pages is kept. */
  #roomAhead({ slot: { cached, request } }: Share): number {
    if (!cached) return 0;
    const { length } = cached;
    const end = Math.min(this.#options.maxContext, request.prompt.length + request.maxNewTokens);
    const isPrompt = length < request.prompt.length;
    return isPrompt ? 0 : Math.min(end - length, this.#options.tile, this.#options.prefixes?.untilBlock(length) ?? end);
  }

  /** Whether all requests have a token after the next one, unless that one ends them, and the GPU can choose both. */
  #goesOnAnyway(decoder: DeviceDecoder, shares: readonly Share[]): boolean {
    // The host draws the tokens that the GPU cannot draw with certainty, and the step after them depends on them.
    const isCertain = shares.every(
      (share) =>
        share.slot.cached !== null &&
        share.slot.request.draws?.isArgmax &&
        !this.#needsLogits(share) &&
        this.#hasNext(share),
    );
    return isCertain && decoder.hasRoom(shares.map(({ cached }) => cached));
  }

  /** Whether more than the token that the GPU has chosen is wanted. */
  #needsLogits({ slot, cached, rows }: Share): boolean {
    const { request, sequence, mask } = slot;
    if (rows === 0) return false;
    if (slot.storesLogits && slot.readAt === 0) return true;
    if (request.promptLogprobs !== null && cached.length <= request.prompt.length) return true;
    const { logprobs, draws, minNewTokens } = request;
    return draws === null || logprobs !== null || mask !== null || sequence.drawn < minNewTokens;
  }

  /** Whether a request needs a token after `token`; a stop string may still end it. */
  #goesOn(share: Share, token: number): boolean {
    return this.#hasNext(share) && (share.slot.request.ignoreSeparator || !this.#options.endTokens.includes(token));
  }

  /** Whether there may be a token after the one that is being computed. */
  #hasNext({ slot: { request, sequence }, rows }: Share): boolean {
    const { drawn, context } = sequence;
    return rows > 0 && drawn + 1 < request.maxNewTokens && context.length + 1 < this.#options.maxContext;
  }

  /** Reads the tokens of the shares in one pass of the model. */
  #read(shares: readonly Share[]): void {
    const { model, kernels } = this.#options;
    let end = 0;
    const rows = shares.flatMap(({ tokens, rows }) => {
      end += tokens.length;
      return Array.from({ length: rows }, (_, i) => end - rows + i);
    });
    const sequences = shares.map(({ cached }) => cached);
    const tokens = shares.map((share) => share.tokens);
    const drafts = shares.map((share) => share.drafts);
    const logits = readRows(model, sequences, tokens, rows, { kernels, drafts });
    let row = 0;
    for (const share of shares) {
      this.#keep(share);
      this.#options.answers.advance(share, logits.slice(row, row + share.rows));
      row += share.rows;
    }
  }

  #keep({ slot, cached }: Share): void {
    const { name, request } = slot;
    const isEnd = cached.length === request.prompt.length - 1 && this.#options.planner.keepsEnd(request);
    if (name) this.#options.prefixes?.keep(name, cached, isEnd);
  }
}
