/**
 * Computes the tokens that a step reads. On a GPU the tokens of texts that are being written go through the device decoder,
 * which draws the next ones where it can; everything else is one pass of the model.
 */
import type { CachedSequence, DecodeCache } from '../../model/cache.js';
import type { LanguageModel } from '../../model/language-model.js';
import type { SparseOptions } from '../../ops/attention/nsa.js';
import { SETTINGS } from '../../ops/sample/op.js';
import { lastLogits, readRows } from '../decode.js';
import { DeviceDecoder, deviceDecoderRefusal } from '../device-decoder.js';
import { RecordedSteps } from '../recorded-steps.js';
import type { PrefixCache } from './prefix/cache.js';
import type { Scheduler, Share } from './scheduler.js';

export interface ExecutorOptions {
  readonly model: LanguageModel;
  readonly kernels: SparseOptions;
  readonly cache: DecodeCache;
  readonly vocabulary: number;
  readonly prefixes: PrefixCache | null;
  readonly scheduler: Scheduler;
  readonly maxContext: number;
  readonly tile: number;
}

/** Whether these kernels compute whole sequences only: then every token reads its context again, and no pages are written. */
export function isWithoutCache({ parity, kernel }: SparseOptions): boolean {
  return parity === true || kernel === 'reference';
}

export class Executor {
  /** Guessed tokens, and those of them that were right. */
  draftTokens = 0;
  acceptedTokens = 0;
  readonly #options: ExecutorOptions;
  /** Null where the host draws every token. */
  readonly #decoder: DeviceDecoder | null;
  /** Null on a GPU. */
  readonly #recorded: RecordedSteps | null;
  /** Steps that the GPU computes now and whose tokens were not read yet, the oldest first; at most two. */
  readonly #inFlight: { readonly shares: readonly Share[]; readonly tokens: () => Int32Array }[] = [];

  constructor(options: ExecutorOptions) {
    this.#options = options;
    const { model, cache, vocabulary, kernels } = options;
    const hasDecoder = !isWithoutCache(kernels) && deviceDecoderRefusal(model) === null;
    this.#decoder = hasDecoder ? new DeviceDecoder(model, cache, { vocabulary }) : null;
    this.#recorded = isWithoutCache(kernels) ? null : RecordedSteps.of(model, kernels);
  }

  /** The shares of the step that the GPU computes and the next call of `run` completes; null if no step is in flight. */
  get launched(): readonly Share[] | null {
    return this.#inFlight[0]?.shares ?? null;
  }

  /** Forgets what is being computed. */
  clear(): void {
    this.#inFlight.length = 0;
  }

  /** Waits for what is being computed. */
  free(): void {
    for (const { tokens } of this.#inFlight.splice(0)) tokens();
    this.#decoder?.free();
    this.#recorded?.free();
  }

  /** Computes a step, or the rest of the one that was `launched`. `requests`: how many run and wait. */
  run(shares: readonly Share[], requests: number): void {
    const isLaunched = this.#inFlight.length > 0;
    // On a GPU the tokens of texts that are being written go first, and do not wait for a tile of a prompt.
    const single = shares.filter(({ tokens }) => tokens.length === 1);
    const decoder = isLaunched ? this.#decoder : this.#decoderFor(single);
    if (decoder) this.#decode(decoder, single, requests);
    const others = decoder ? shares.filter(({ tokens }) => tokens.length > 1) : shares;
    if (others.length > 0) this.#read(others);
  }

  /** The decoder, if it can read the shares, of one token each. */
  #decoderFor(shares: readonly Share[]): DeviceDecoder | null {
    const hasRoom = shares.length > 0 && this.#decoder?.hasRoom(shares.map(({ pages }) => pages));
    return hasRoom ? this.#decoder : null;
  }

  /**
   * One token of every share on the GPU, which also draws the next ones where it can. Then nothing but these tokens is read
   * back, and the next step is launched before the host deals with them, or even before it has them: the row of a text that
   * ends meanwhile is wasted.
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
      const { sequence, rows } = share;
      // A text may have ended while its next token was computed.
      if (sequence.pages === null) allGoOn = false;
      else if (!isAhead && (best[i] < 0 || needsLogits(share))) logits[i] = decoder.logitsOf(i);
      if (logits[i] !== null || rows === 0 || !sequence.goesOnAfter(best[i])) allGoOn = false;
      if (sequence.pages !== null && !isAhead) this.#keep(share);
    }
    // Until the next launch the GPU waits: what can be done after it is done after it.
    if (allGoOn && decoder.hasRoom(shares.map(({ pages }) => pages))) this.#launch(decoder, shares, 1);
    for (const [i, share] of shares.entries())
      if (share.sequence.pages !== null) this.#answer(share, logits[i] === null ? best[i] : [logits[i]]);
  }

  /** Launches the step of the shares' tokens, or with `ahead` 1 of the tokens that follow them on the device. */
  #launch(decoder: DeviceDecoder, shares: readonly Share[], ahead: 0 | 1): void {
    decoder.launch(
      shares.map(({ pages }) => pages),
      ahead === 0 ? shares.map(({ tokens }) => tokens[0]) : null,
      drawSettings(shares, ahead),
    );
    this.#inFlight.push({ shares, tokens: decoder.nextLater() });
    decoder.reserveAhead((i) => this.#roomAhead(shares[i]));
  }

  /** Tokens for which the sequence has memory, up to the next length at which a fork of its pages is kept. */
  #roomAhead({ sequence: { pages, request } }: Share): number {
    if (!pages) return 0;
    const { maxContext, tile, prefixes } = this.#options;
    const { length } = pages;
    const end = Math.min(maxContext, request.prompt.length + request.maxNewTokens);
    const isPrompt = length < request.prompt.length;
    return isPrompt ? 0 : Math.min(end - length, tile, prefixes?.untilBlock(length) ?? end);
  }

  /** Whether all texts have a token after the next one, unless that one ends them, and the GPU can choose both. */
  #goesOnAnyway(decoder: DeviceDecoder, shares: readonly Share[]): boolean {
    // The host draws the tokens that the GPU cannot draw with certainty, and the step after them depends on them. A token
    // that ends a text must not be in pages that are kept.
    const isCertain = shares.every((share) => {
      const { sequence, rows } = share;
      const { pages, request, kept, hasNext } = sequence;
      return pages && request.draws?.isArgmax && !kept && rows > 0 && hasNext && !needsLogits(share);
    });
    return isCertain && decoder.hasRoom(shares.map(({ pages }) => pages));
  }

  /** Reads the tokens of the shares in one pass of the model. */
  #read(shares: readonly Share[]): void {
    const { model, kernels } = this.#options;
    const logits = isWithoutCache(kernels)
      ? this.#readWhole(shares)
      : (this.#repeat(shares) ?? readShares(model, shares, kernels));
    let row = 0;
    for (const share of shares) {
      this.#keep(share);
      this.#answer(share, logits.slice(row, row + share.rows));
      row += share.rows;
    }
  }

  /** Logits of a step that was recorded, or can be: one token of each text. Null for other steps. */
  #repeat(shares: readonly Share[]): Float32Array[] | null {
    if (!shares.every(({ tokens, rows }) => tokens.length === 1 && rows === 1)) return null;
    const sequences = shares.map(({ pages }) => pages);
    return (
      this.#recorded?.read(
        sequences,
        shares.map(({ tokens }) => tokens[0]),
      ) ?? null
    );
  }

  #readWhole(shares: readonly Share[]): Float32Array[] {
    const { model, kernels } = this.#options;
    return shares.flatMap(({ sequence: { context }, pages, tokens, rows }) => {
      pages.advance(tokens.length);
      const first = pages.length - rows + 1;
      return Array.from({ length: rows }, (_, i) => lastLogits(model, context.slice(0, first + i), kernels));
    });
  }

  #keep({ sequence: { keys, request }, pages }: Share): void {
    const { prefixes, scheduler } = this.#options;
    const isEnd = pages.length === request.prompt.length - 1 && scheduler.keepsEnd(request);
    if (keys) prefixes?.keep(keys, pages, isEnd);
  }

  /** The share's tokens were read; `next` is the token that the device has drawn after them, or the logits of its rows. */
  #answer({ sequence, pages, tokens, rows, drafts }: Share, next: number | readonly Float32Array[]): void {
    const { keys, request } = sequence;
    const { length } = request.prompt;
    const logits = typeof next === 'number' ? null : next;
    if (logits && request.promptLogprobs !== null && pages.length <= length)
      sequence.addPromptLogprobs(pages.length - tokens.length, logits);
    // Without rows the end of the prompt was read after the answer began, with logits from a file.
    if (pages.length < length || rows === 0) {
      if (!sequence.isWriting) sequence.progress();
      return;
    }
    if (!sequence.isWriting) {
      const last = logits?.at(-1)?.subarray(0, this.#options.vocabulary);
      if (keys && sequence.storesLogits && last) this.#options.prefixes?.keepLogits(keys, length, last);
      sequence.endPrompt();
    }
    if (sequence.pages === null) return; // no token was wanted
    if (typeof next === 'number') {
      sequence.take(next);
      return;
    }
    const right = sequence.draw(next.slice(-1 - drafts), tokens.slice(tokens.length - drafts));
    if (drafts === 0) return;
    this.draftTokens += drafts;
    this.acceptedTokens += right;
    sequence.drafts?.checked(drafts, right);
    if (sequence.pages !== null) pages.truncate(sequence.context.length - 1);
  }

  /** Launches a step of every kind of batch, which compiles and loads its kernels. */
  warmUp(sequence: CachedSequence, maxBatch: number): void {
    for (const size of batchSizes(maxBatch)) if (this.#decoder) warmUpStep(this.#decoder, sequence, size);
  }
}

/** Whether more than the token that the GPU has chosen is wanted. */
function needsLogits({ sequence, pages, rows }: Share): boolean {
  const { request } = sequence;
  if (rows === 0) return false;
  if (sequence.storesLogits && !sequence.isWriting) return true;
  if (request.promptLogprobs !== null && pages.length <= request.prompt.length) return true;
  return sequence.needsLogits;
}

/** Logits of the rows of the shares, after one pass over their tokens. */
function readShares(model: LanguageModel, shares: readonly Share[], kernels: SparseOptions): Float32Array[] {
  let end = 0;
  const rows = shares.flatMap(({ tokens, rows }) => {
    end += tokens.length;
    return Array.from({ length: rows }, (_, i) => end - rows + i);
  });
  const sequences = shares.map(({ pages }) => pages);
  const tokens = shares.map((share) => share.tokens);
  const drafts = shares.map((share) => share.drafts);
  return readRows(model, sequences, tokens, rows, { kernels, drafts });
}

/** Batch sizes that between them use all kernels of the decode step: 1, 2, 3, 4, 6, 8, 12, … and the largest first. */
function batchSizes(most: number): number[] {
  const sizes = [most];
  for (let size = 1; size < most; size *= 2) sizes.push(size, ...(size > 1 && 1.5 * size < most ? [1.5 * size] : []));
  return sizes;
}

/** Launches a step, twice for a single sequence so that it is also recorded, and reads what a step gives back. */
function warmUpStep(decoder: DeviceDecoder, sequence: CachedSequence, size: number): void {
  const forks = Array.from({ length: size }, () => sequence.fork());
  const row = [1, 0, 0.9, 0, 0.5]; // in the order of SETTINGS; top-p runs all parts of the kernel
  const settings = new Float64Array(SETTINGS * size).map((_, i) => row[i % SETTINGS]);
  for (let i = 0; i < (size === 1 ? 2 : 1) && decoder.hasRoom(forks); i++) {
    decoder.launch(
      forks,
      forks.map(() => 0),
      settings,
    );
    decoder.nextLater()();
    decoder.logitsOf(0);
  }
  for (const fork of forks) fork.free();
}

/** Settings of the draws that follow the last tokens of the shares and `ahead` more; null if all are the argmax. */
function drawSettings(shares: readonly Share[], ahead: number): Float64Array | null {
  if (shares.every(({ sequence }) => sequence.request.draws?.isArgmax ?? true)) return null;
  const settings = new Float64Array(SETTINGS * shares.length); // temperature 0: the argmax
  shares.forEach(({ sequence: { request, drawn } }, i) => {
    if (request.draws) settings.set(request.draws.settings(drawn + ahead), SETTINGS * i);
  });
  return settings;
}
