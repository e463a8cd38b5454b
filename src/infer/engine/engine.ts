/**
 * The engine: answers many requests with one model at the same time (continuous batching). Every step is one forward
 * pass over the next token of each request that is generating and a bounded tile of prompts that are being read.
 *
 * On the CPU a request's tokens are bit for bit those it would get alone: kernels compute each token by its own sequence
 * only, in an order that does not depend on the batch or the tile. A request gets memory for its longest possible text
 * before it starts, so a request that runs never lacks pages.
 */
import { setImmediate } from 'node:timers/promises';
import { TrefoilError, UsageError } from '../../errors.js';
import { type CachedSequence, DecodeCache } from '../../model/cache.js';
import { kernelOptions } from '../../model/kernels.js';
import type { SparseOptions } from '../../ops/attention/nsa.js';
import { readRows } from '../decode.js';
import { DeviceDecoder, deviceDecoderRefusal } from '../device-decoder.js';
import { DEFAULT_MAX_CONTEXT, type TextSource, usedVocabulary } from '../generate.js';
import { type FinishReason, GeneratedSequence, StopFilter } from '../generated-sequence.js';
import { UnusableLogits } from '../sampler.js';
import { StructuredOutput } from '../structured/structured-output.js';
import { Channel } from './channel.js';
import { drawSettings, warmUpSteps } from './device-steps.js';
import { PromptLookup } from './drafts.js';
import { modelFingerprint } from './fingerprint.js';
import type { Engine, EngineOptions, EngineStats, EventSink } from './interface.js';
import { positionLogprobs } from './logprobs.js';
import { PrefixCache, prefixBlock } from './prefix-cache.js';
import { PrefixFiles } from './prefix-files.js';
import { type CheckedRequest, checkRequest, type EngineEvent, type EngineRequest, RequestRefused } from './request.js';
import type { Share, Slot } from './slot.js';

const DEFAULT_TILE = { cpu: 256, cuda: 2048 };
/** Tiles that a step reads while no request generates, which would wait: a GPU is faster with fewer passes. */
const IDLE_TILES = { cpu: 1, cuda: 4 };
const GIB = 2 ** 30;
/** Freed activations that the pool keeps for the next step, and the share of a GPU's free memory: allocating is slow there. */
const POOL_SLACK = 256 * 2 ** 20;
const GPU_SLACK = 1 / 16;

/** An engine for a model that `loadModel` returned. */
export function createEngine(source: TextSource, options: EngineOptions = {}): Engine {
  return new BatchEngine(source, options);
}

class BatchEngine implements Engine {
  readonly maxContext: number;
  readonly maxTokens: number;
  readonly maxBatch: number;
  readonly #source: TextSource;
  readonly #kernels: SparseOptions;
  readonly #vocabulary: number;
  readonly #endTokens: readonly number[];
  readonly #structured: StructuredOutput;
  readonly #cache: DecodeCache;
  readonly #decoder: DeviceDecoder | null;
  readonly #prefixes: PrefixCache | null;
  /** Most bytes of unused memory between steps. */
  readonly #slack: number;
  readonly #options: Required<Omit<EngineOptions, `prefixCache${string}`>>;
  readonly #waiting: Slot[] = [];
  #running: Slot[] = [];
  #waitingTokens = 0;
  #reserved = 0;
  /** Steps that the GPU computes now and whose tokens were not read yet, the oldest first; at most two. */
  readonly #inFlight: { readonly shares: readonly Share[]; readonly tokens: () => Int32Array }[] = [];
  #loop: Promise<void> | null = null;
  /** Ends the wait for files, if no request can do anything else. */
  #wake: () => void = () => {};
  #failure: unknown = null;
  #isClosed = false;
  #draftTokens = 0;
  #acceptedTokens = 0;

  constructor(source: TextSource, options: EngineOptions) {
    const { model, config } = source;
    this.#source = source;
    this.#kernels = kernelOptions(config);
    if (this.#kernels.parity || this.#kernels.kernel === 'reference')
      throw new UsageError(
        'the engine decodes from a cache, which the reference kernels do not: unset NSA_FORCE_PARITY',
      );
    this.#vocabulary = usedVocabulary(source);
    const { tokenizer, endTokens = [] } = source;
    this.#endTokens = [...new Set([...(tokenizer.endTokens ?? [tokenizer.separator]), ...endTokens])];
    this.#structured = new StructuredOutput(tokenizer, this.#vocabulary, this.#endTokens);
    const { speculate = 0 } = options;
    expectSpeculation(speculate, model.device.kind);
    this.#cache = new DecodeCache(model.device, model.shape, model.dtype, speculate);
    this.#decoder =
      deviceDecoderRefusal(model) === null
        ? new DeviceDecoder(model, this.#cache, { vocabulary: this.#vocabulary })
        : null;
    const { maxBatch = 32, maxContext = DEFAULT_MAX_CONTEXT, maxQueued = 256 } = options;
    const { tile = DEFAULT_TILE[model.device.kind], maxQueuedTokens = 8 * maxContext } = options;
    const { idleTile = tile * IDLE_TILES[model.device.kind] } = options;
    for (const [name, value] of Object.entries({ maxBatch, maxContext, tile, idleTile }))
      if (!Number.isSafeInteger(value) || value < 1)
        throw new UsageError(`${name}: ${value} is not a positive integer`);
    this.maxContext = maxContext;
    const needed = maxBatch * this.#cache.mostBytes(maxContext, tile);
    const free = model.device.freeBytes();
    this.#slack = Math.max(POOL_SLACK, model.device.kind === 'cuda' ? GPU_SLACK * free : 0);
    const { cacheBytes = Math.min(needed, free / 2), prefixCacheBytes = Math.min(GIB, free / 4) } = options;
    this.maxBatch = maxBatch;
    this.maxTokens = longestWithin(cacheBytes, maxContext, (length) => this.#cache.mostBytes(length, tile));
    if (this.maxTokens < 2)
      throw new UsageError(`cacheBytes: ${mib(cacheBytes)} do not hold a request of two tokens; raise it (--cache-gb)`);
    this.#options = { maxBatch, maxContext, maxQueued, maxQueuedTokens, tile, idleTile, cacheBytes, speculate };
    this.#prefixes = prefixCacheBytes > 0 ? this.#createPrefixes(prefixCacheBytes, tile, options) : null;
    if (!this.#prefixes && options.prefixCacheDir !== undefined)
      throw new UsageError('prefixCacheDir: needs memory for prefixes; raise prefixCacheBytes (--prefix-cache-gb)');
  }

  #createPrefixes(bytes: number, tile: number, options: EngineOptions): PrefixCache {
    const block = prefixBlock(this.#cache, tile);
    const { prefixCacheDir, prefixCacheDirBytes = 16 * GIB } = options;
    if (prefixCacheDir === undefined) return new PrefixCache(this.#cache, block, bytes);
    const files = new PrefixFiles(prefixCacheDir, prefixCacheDirBytes);
    const fingerprint = modelFingerprint(this.#source.model, this.#cache, [block, this.#kernels]);
    const isReading = () =>
      this.#waiting.length > 0 || this.#running.some(({ readAt, isLoading }) => readAt === 0 || isLoading);
    return new PrefixCache(this.#cache, block, bytes, { files, fingerprint, isReading });
  }

  get failure(): string | null {
    if (this.#failure === null) return null;
    return this.#failure instanceof TrefoilError ? this.#failure.message : 'the model failed';
  }

  submit(request: EngineRequest): AsyncIterable<EngineEvent> {
    const channel = new Channel<EngineEvent>(() => cancel());
    const cancel = this.listen(request, channel);
    return channel;
  }

  listen(request: EngineRequest, sink: EventSink): () => void {
    const { maxBatch, maxContext, maxQueued, maxQueuedTokens, tile, cacheBytes } = this.#options;
    if (this.#isClosed || this.#failure)
      throw new RequestRefused('closed', this.#failure ? 'the engine failed' : 'the engine is closed');
    const checked = checkRequest(request, this.#vocabulary);
    const { length } = checked.prompt;
    if (length >= maxContext)
      throw new RequestRefused('too_large', `the prompt has ${length} tokens; at most ${maxContext - 1} are allowed`);
    const reserved = this.#cache.mostBytes(Math.min(maxContext, length + checked.maxNewTokens), tile);
    if (reserved > cacheBytes)
      throw new RequestRefused(
        'too_large',
        `the request can need ${mib(reserved)} of cache, and there are ${mib(cacheBytes)}: ask for fewer tokens`,
      );
    const { responseFormat } = request;
    const budget = Math.min(checked.maxNewTokens, maxContext - length);
    const mask = responseFormat ? this.#structured.mask(responseFormat, budget) : null;
    const isFull = this.#waiting.length >= maxQueued + maxBatch - this.#running.length;
    if (isFull || (this.#waitingTokens > 0 && this.#waitingTokens + length > maxQueuedTokens))
      throw new RequestRefused('busy', `${this.#waiting.length} requests are waiting: try again later`);
    const slot = this.#newSlot(mask ? { ...checked, mask: () => mask } : checked, reserved, sink);
    const cancel = () => {
      slot.isCancelled = true;
      this.#wake();
    };
    request.signal?.addEventListener('abort', cancel, { once: true });
    if (request.signal?.aborted) cancel();
    this.#waiting.push(slot);
    this.#waitingTokens += length;
    this.#loop ??= this.#run();
    this.#wake();
    return cancel;
  }

  warmUp(): void {
    this.#warmUpHost();
    const { tile, idleTile } = this.#options;
    const isGpu = this.#source.model.device.kind === 'cuda';
    const sequence = this.#cache.sequence();
    try {
      // Tiles of a prompt, the first one and others, and its end; then steps, of which the second is recorded. A GPU chooses
      // kernels by the number of tokens, and its pool gets the memory of a tile.
      const counts = isGpu ? [idleTile, idleTile, tile, 1] : [8, 1];
      for (const count of counts) this.#readUnused(sequence, Math.min(count, this.maxContext - 1));
      if (this.#decoder) warmUpSteps(this.#decoder, sequence, this.maxBatch);
      this.#source.model.device.synchronize();
    } finally {
      sequence.free();
    }
  }

  /** What the host does with a long prompt, until it is compiled: a first request would take ten times as long. */
  #warmUpHost(): void {
    const prompt = new Int32Array(Math.min(16_384, this.maxContext - 1));
    for (let i = 0; i < 20; i++) {
      checkRequest({ prompt }, this.#vocabulary);
      const text = plainArray(prompt);
      this.#prefixes?.name('', prompt, text).endKey(text.length);
    }
  }

  #readUnused(sequence: CachedSequence, count: number): void {
    readRows(this.#source.model, [sequence], [new Array(count).fill(0)], [count - 1], { kernels: this.#kernels });
  }

  stats(): EngineStats {
    const files = this.#prefixes?.files?.stats;
    return {
      running: this.#running.length,
      waiting: this.#waiting.length,
      pageBytes: this.#cache.bytes,
      reservedBytes: this.#reserved,
      cacheBytes: this.#options.cacheBytes,
      prefixQueries: this.#prefixes?.queries ?? 0,
      prefixHits: this.#prefixes?.hits ?? 0,
      prefixFileHits: this.#prefixes?.fileHits ?? 0,
      prefixFileBytes: files?.bytes ?? 0,
      prefixFilesDamaged: files?.damaged ?? 0,
      prefixFileErrors: files?.errors ?? 0,
      draftTokens: this.#draftTokens,
      acceptedTokens: this.#acceptedTokens,
    };
  }

  async close(): Promise<void> {
    this.#isClosed = true;
    for (const slot of [...this.#waiting, ...this.#running]) slot.isCancelled = true;
    this.#wake();
    await this.#loop;
    await this.#prefixes?.close();
    this.#decoder?.free();
  }

  #newSlot(request: CheckedRequest, reserved: number, sink: EventSink): Slot {
    const { speculate } = this.#options;
    const decoder = this.#source.tokenizer.createStreamDecoder();
    const sequence = new GeneratedSequence(0, plainArray(request.prompt), decoder, new StopFilter(request.stop));
    return {
      request,
      reserved,
      submittedAt: performance.now(),
      promptLogprobs: [],
      cached: null,
      name: null,
      mask: null,
      startedAt: 0,
      readAt: 0,
      cachedTokens: 0,
      isCancelled: false,
      isLoading: false,
      storesLogits: false,
      sequence,
      lookup: speculate > 0 ? new PromptLookup(sequence.context, speculate) : null,
      sink,
    };
  }

  /** Steps until no request is left. Between steps the event loop runs: submissions, cancellations, output. */
  async #run(): Promise<void> {
    await setImmediate(); // requests that are submitted together start together
    try {
      while (this.#waiting.length + this.#running.length + this.#inFlight.length > 0) {
        this.#step();
        const isIdle = this.#running.length > 0 && this.#running.every(({ isLoading }) => isLoading);
        await (isIdle ? new Promise<void>((resolve) => (this.#wake = resolve)) : setImmediate());
      }
    } catch (error) {
      this.#fail(error);
    } finally {
      this.#loop = null;
    }
  }

  #fail(error: unknown): void {
    this.#failure = error;
    for (const slot of [...this.#waiting.splice(0), ...this.#running]) this.#release(slot, error);
    this.#running = [];
    this.#inFlight.length = 0;
    this.#waitingTokens = 0;
  }

  #step(): void {
    if (this.#failure) throw this.#failure;
    this.#dropCancelled();
    this.#admit();
    const isLaunched = this.#inFlight.length > 0;
    const shares = isLaunched ? this.#inFlight[0].shares : this.#plan();
    if (shares.length === 0) return;
    // On a GPU the tokens of requests that generate go first, and do not wait for a tile of a prompt.
    const single = shares.filter(({ tokens }) => tokens.length === 1);
    const decoder = isLaunched ? this.#decoder : this.#decoderFor(single);
    if (decoder) this.#decode(decoder, single);
    const others = decoder ? shares.filter(({ tokens }) => tokens.length > 1) : shares;
    if (others.length > 0) this.#read(others);
    this.#running = this.#running.filter(({ cached }) => cached !== null);
    const { pool } = this.#source.model.device;
    if (pool.bytesReserved - pool.bytesInUse > this.#slack) pool.trim();
  }

  #dropCancelled(): void {
    for (let i = this.#waiting.length - 1; i >= 0; i--)
      if (this.#waiting[i].isCancelled) {
        const [slot] = this.#waiting.splice(i, 1);
        this.#waitingTokens -= slot.request.prompt.length;
        this.#end(slot, 'aborted');
      }
    for (const slot of this.#running) if (slot.isCancelled) this.#end(slot, 'aborted');
    this.#running = this.#running.filter(({ cached }) => cached !== null);
  }

  /** Starts waiting requests in their order while there are places and memory. */
  #admit(): void {
    const { maxBatch, cacheBytes } = this.#options;
    while (this.#waiting.length > 0 && this.#running.length < maxBatch) {
      const [slot] = this.#waiting;
      if (this.#reserved + slot.reserved > cacheBytes) return;
      this.#waiting.shift();
      this.#waitingTokens -= slot.request.prompt.length;
      try {
        slot.mask = slot.request.mask?.() ?? null;
      } catch (error) {
        this.#release(slot, error); // the caller's function: its request fails, not the engine
        continue;
      }
      this.#start(slot);
    }
  }

  #start(slot: Slot): void {
    const { prompt, promptLogprobs, cacheSalt } = slot.request;
    this.#reserved += slot.reserved;
    slot.name = this.#prefixes?.name(cacheSalt, prompt, slot.sequence.context) ?? null;
    const found = promptLogprobs === null && slot.name ? this.#prefixes?.longest(slot.name, prompt.length) : null;
    slot.cached = found ?? this.#cache.sequence();
    slot.cachedTokens = slot.cached.length;
    slot.startedAt = performance.now();
    this.#running.push(slot);
    if (slot.cachedTokens > 0) this.#progress(slot);
    const { length } = slot.cached;
    const prefixes = promptLogprobs === null && this.#prefixes?.files ? this.#prefixes : null;
    if (!prefixes?.isLong(prompt.length) || length >= prompt.length - 1) return;
    slot.storesLogits = true;
    void this.#load(prefixes, slot, slot.cached);
  }

  /**
   * Begins the answer with the logits of a file if the whole prompt is a repeat, and continues the cached part of the prompt
   * with blocks from files; the request takes part in steps again after that.
   */
  async #load(prefixes: PrefixCache, slot: Slot, cached: CachedSequence): Promise<void> {
    const isWanted = () => slot.cached === cached;
    const { name, request } = slot;
    const { length } = request.prompt;
    if (!name) return;
    slot.isLoading = true;
    try {
      const logits = await prefixes.loadLogits(name, length, this.#vocabulary);
      if (logits && isWanted()) this.#beginWith(slot, logits);
      if (isWanted()) await prefixes.load(name, length, cached, isWanted);
    } catch (error) {
      this.#failure ??= error;
    }
    slot.isLoading = false;
    this.#wake();
    if (!isWanted() || (slot.readAt === 0 && cached.length === slot.cachedTokens)) return;
    slot.cachedTokens = cached.length;
    if (slot.readAt === 0) this.#progress(slot);
  }

  /** The logits after the prompt are known before its pages are there. */
  #beginWith(slot: Slot, logits: Float32Array): void {
    slot.storesLogits = false;
    slot.cachedTokens = slot.request.prompt.length;
    this.#endPrompt(slot, slot.cachedTokens);
    if (slot.request.maxNewTokens === 0) this.#end(slot, 'length');
    else this.#orRelease(slot, () => this.#draw(slot, logits));
  }

  /** The prompt is read, or what follows it is known. */
  #endPrompt(slot: Slot, processed: number): void {
    slot.readAt = performance.now();
    this.#progress(slot, processed);
    slot.sink.push({ type: 'prompt', logprobs: slot.promptLogprobs });
  }

  /** Logits that are not finite end their request, not the engine. */
  #orRelease(slot: Slot, work: () => void): void {
    try {
      work();
    } catch (error) {
      this.#release(slot, error);
    }
  }

  /**
   * A token of every request that generates, and at most `tile` tokens of prompts, or `idleTile` if none generates, the oldest
   * request first.
   */
  #plan(): Share[] {
    const isGenerating = this.#running.some(({ readAt }) => readAt > 0);
    let left = this.#options[isGenerating ? 'tile' : 'idleTile'];
    const shares: Share[] = [];
    for (const slot of this.#running) {
      const { cached, request, sequence } = slot;
      if (!cached || slot.isLoading) continue;
      const unread = sequence.context.length - cached.length;
      const isPrompt = cached.length < request.prompt.length;
      const count = isPrompt ? this.#untilKept(slot, cached, left) : 1;
      if (count === 0) continue;
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

  /** At most `most` tokens of a prompt, up to a length at which it is kept or to its end. */
  #untilKept({ request, sequence }: Slot, { length }: CachedSequence, most: number): number {
    const isEndKept = length < request.prompt.length - 1 && this.#keepsEnd(request);
    const end = isEndKept ? request.prompt.length - 1 : sequence.context.length;
    const count = Math.min(end - length, most);
    return this.#prefixes?.untilKept(length, count) ?? count;
  }

  #keepsEnd({ prompt, promptLogprobs }: CheckedRequest): boolean {
    return promptLogprobs === null && (this.#prefixes?.keepsEnd(prompt.length) ?? false);
  }

  /** Guesses for the tokens after the next one; fewer than `left`. */
  #draft({ lookup, request, sequence }: Slot, { length }: CachedSequence, left: number): number[] {
    if (!lookup) return [];
    const { context, drawn } = sequence;
    const unwritten = Math.min(request.maxNewTokens - drawn, this.maxContext - context.length);
    // The last token of a block is read without drafts, so that the prefix cache keeps no rows of drafts.
    const room = (this.#prefixes?.untilBlock(length) ?? Number.POSITIVE_INFINITY) - 2;
    return lookup.next(Math.min(unwritten - 1, left - 1, room));
  }

  /** The decoder, if it can read the shares, of one token each. */
  #decoderFor(shares: readonly Share[]): DeviceDecoder | null {
    if (!this.#decoder || shares.length === 0) return null;
    return this.#decoder.hasRoom(shares.map(({ cached }) => cached)) ? this.#decoder : null;
  }

  /**
   * One token of every share on the GPU, which also draws the next ones where it can. Then nothing but these tokens is read
   * back, and the next step is launched before the host deals with them, or even before it has them: the row of a request
   * that ends meanwhile is wasted.
   */
  #decode(decoder: DeviceDecoder, shares: readonly Share[]): void {
    if (this.#inFlight.length === 0) this.#launch(decoder, shares, 0);
    const isAhead = this.#goesOnAnyway(decoder, shares);
    if (isAhead) {
      for (const share of shares) this.#keep(share);
      this.#launch(decoder, shares, 1);
    }
    const best = this.#inFlight.shift()?.tokens() ?? decoder.next();
    const logits: (Float32Array | null)[] = [];
    let allGoOn = !isAhead && this.#waiting.length === 0 && this.#running.length === shares.length;
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
      if (share.slot.cached !== null) this.#advance(share, logits[i] === null ? best[i] : [logits[i]]);
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
    const end = Math.min(this.maxContext, request.prompt.length + request.maxNewTokens);
    const isPrompt = length < request.prompt.length;
    return isPrompt ? 0 : Math.min(end - length, this.#options.tile, this.#prefixes?.untilBlock(length) ?? end);
  }

  /** Whether all requests have a token after the next one, unless that one ends them, and the GPU can choose both. */
  #goesOnAnyway(decoder: DeviceDecoder, shares: readonly Share[]): boolean {
    if (this.#waiting.length > 0 || this.#running.length !== shares.length) return false;
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
    return this.#hasNext(share) && (share.slot.request.ignoreSeparator || !this.#endTokens.includes(token));
  }

  /** Whether there may be a token after the one that is being computed. */
  #hasNext({ slot: { request, sequence }, rows }: Share): boolean {
    const { drawn, context } = sequence;
    return rows > 0 && drawn + 1 < request.maxNewTokens && context.length + 1 < this.maxContext;
  }

  /** Reads the tokens of the shares in one pass of the model. */
  #read(shares: readonly Share[]): void {
    let end = 0;
    const rows = shares.flatMap(({ tokens, rows }) => {
      end += tokens.length;
      return Array.from({ length: rows }, (_, i) => end - rows + i);
    });
    const sequences = shares.map(({ cached }) => cached);
    const tokens = shares.map((share) => share.tokens);
    const drafts = shares.map((share) => share.drafts);
    const logits = readRows(this.#source.model, sequences, tokens, rows, { kernels: this.#kernels, drafts });
    let row = 0;
    for (const share of shares) {
      this.#keep(share);
      this.#advance(share, logits.slice(row, row + share.rows));
      row += share.rows;
    }
  }

  #keep({ slot, cached }: Share): void {
    const { name, request } = slot;
    const isEnd = cached.length === request.prompt.length - 1 && this.#keepsEnd(request);
    if (name) this.#prefixes?.keep(name, cached, isEnd);
  }

  /** The share's tokens were read; `next` is the most probable token after them, or the logits of its rows. */
  #advance(share: Share, next: number | readonly Float32Array[]): void {
    const { slot, cached, tokens } = share;
    const { request } = slot;
    const hasPrompt = cached.length >= request.prompt.length;
    if (typeof next !== 'number' && request.promptLogprobs !== null && cached.length <= request.prompt.length)
      this.#addPromptLogprobs(slot, cached.length - tokens.length, next);
    if (!hasPrompt) {
      if (slot.readAt === 0) this.#progress(slot);
      return;
    }
    if (slot.readAt === 0) {
      const last = typeof next === 'number' ? undefined : next.at(-1);
      if (slot.name && slot.storesLogits && last)
        this.#prefixes?.keepLogits(slot.name, request.prompt.length, last.subarray(0, this.#vocabulary));
      this.#endPrompt(slot, request.prompt.length);
    }
    if (request.maxNewTokens === 0) {
      this.#end(slot, 'length');
      return;
    }
    this.#orRelease(slot, () => {
      if (typeof next !== 'number') this.#drawShare(share, next.slice(-1 - share.drafts));
      else if (next >= 0) this.#accept(slot, next, null);
      else throw new UnusableLogits(`a logit of token ${cached.length} is not finite`);
    });
  }

  #addPromptLogprobs({ request, promptLogprobs }: Slot, first: number, logits: readonly Float32Array[]): void {
    for (const [i, row] of logits.entries()) {
      const next = request.prompt[first + i + 1];
      if (next !== undefined)
        promptLogprobs.push(positionLogprobs(row, next, request.promptLogprobs ?? 0, this.#vocabulary));
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
    this.#draftTokens += drafts;
    this.#acceptedTokens += accepted;
    slot.lookup?.checked(drafts, accepted);
    if (slot.cached) cached.truncate(context.length - 1);
  }

  #draw(slot: Slot, logits: Float32Array): void {
    const { request, sequence, mask } = slot;
    const isEarly = sequence.drawn < request.minNewTokens;
    let candidates = logits.subarray(0, this.#vocabulary);
    if (mask || isEarly) {
      candidates = candidates.slice();
      mask?.apply(candidates);
      if (isEarly) for (const token of this.#endTokens) candidates[token] = Number.NEGATIVE_INFINITY;
    }
    let token = request.sample(candidates, sequence.drawn, sequence.seen);
    if (mask?.narrow?.(token, candidates)) token = request.sample(candidates, sequence.drawn, sequence.seen);
    this.#accept(slot, token, logits);
  }

  /** The next token of a request is `token`. */
  #accept(slot: Slot, token: number, logits: Float32Array | null): void {
    const { request, sequence, mask, sink } = slot;
    mask?.accept(token);
    const isEnd = this.#endTokens.includes(token) && !request.ignoreSeparator;
    let text = sequence.add(token, isEnd, request.maxNewTokens, this.maxContext);
    if (mask?.isComplete || (isEnd && mask?.isCut)) text += sequence.complete(mask.isCut ?? false);
    if (isEnd) {
      this.#end(slot, 'separator', text);
      return;
    }
    const logprobs =
      request.logprobs === null || logits === null
        ? {}
        : { logprobs: positionLogprobs(logits, token, request.logprobs, this.#vocabulary) };
    sink.push({ type: 'token', token, text, ...logprobs });
    if (sequence.finishReason !== null) this.#end(slot, sequence.finishReason, '');
  }

  #progress({ request, cached, cachedTokens, sink }: Slot, processed = cached?.length ?? 0): void {
    sink.push({ type: 'progress', total: request.prompt.length, cached: cachedTokens, processed });
  }

  /** `text`: the last text, if the sequence has already finished. */
  #end(slot: Slot, reason: FinishReason, text = slot.sequence.finish(reason)): void {
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
    this.#release(slot);
  }

  #release(slot: Slot, error: unknown = null): void {
    if (slot.cached) {
      slot.cached.free();
      slot.cached = null;
      this.#reserved -= slot.reserved;
    }
    slot.sink.end(error);
  }
}

function expectSpeculation(speculate: number, kind: 'cpu' | 'cuda'): void {
  if (!Number.isSafeInteger(speculate) || speculate < 0)
    throw new UsageError(`speculate: ${speculate} is not allowed; use an integer of at least 0`);
  if (speculate > 0 && kind !== 'cpu')
    throw new UsageError(
      'speculate: only on the CPU, where checking several tokens at once gives exactly what single steps give; ' +
        'leave out --speculate',
    );
}

/** The largest length up to `most` that takes at most `bytes`. */
function longestWithin(bytes: number, most: number, bytesOf: (length: number) => number): number {
  let [low, high] = [0, most];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (bytesOf(middle) <= bytes) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Several times as fast as `Array.from` of a typed array. */
function plainArray(values: ArrayLike<number>): number[] {
  const result = new Array<number>(values.length);
  for (let i = 0; i < values.length; i++) result[i] = values[i];
  return result;
}

function mib(bytes: number): string {
  return `${Math.ceil(bytes / 2 ** 20)} MiB`;
}
