/**
 * The engine: answers many requests with one model at the same time (continuous batching). Every step is one forward
 * pass over the next token of each request that is generating and a bounded tile of prompts that are being read.
 *
 * On the CPU a request's tokens are bit for bit those it would get alone: kernels compute each token by its own sequence
 * only, in an order that does not depend on the batch or the tile. A request gets memory for its longest possible text
 * before it starts, so a request that runs never lacks pages.
 */
import { TrefoilError, UsageError } from '../../errors.js';
import { type CachedSequence, DecodeCache } from '../../model/cache.js';
import { kernelOptions } from '../../model/kernels.js';
import type { SparseOptions } from '../../ops/attention/nsa.js';
import { turn } from '../../turn.js';
import { readRows } from '../decode.js';
import { refusalOf } from '../prompt.js';
import { StructuredOutput } from '../structured/structured-output.js';
import { endTokensOf, type TextSource, usedVocabulary } from '../text-source.js';
import { PromptLookup } from './drafts.js';
import { Executor, isWithoutCache } from './executor.js';
import type { Engine, EngineOptions, EngineStats, EventSink } from './interface.js';
import type { PrefixCache } from './prefix/cache.js';
import type { OpenPrefixes } from './prefix/open.js';
import { checkRequest, DEFAULT_MAX_CONTEXT, type EngineEvent, type EngineRequest, RequestRefused } from './request.js';
import { createSampler } from './sampler.js';
import { Scheduler, type Share } from './scheduler.js';
import { type KeptPages, plainArray, Sequence, type SequenceLimits } from './sequence.js';

const DEFAULT_TILE = { cpu: 256, cuda: 2048 };
/** Tiles that a step reads while no request generates, which would wait: a GPU is faster with fewer passes. */
const IDLE_TILES = { cpu: 1, cuda: 4 };
const GIB = 2 ** 30;
/** Freed activations that the pool keeps for the next step, and the share of a GPU's free memory: allocating is slow there. */
const POOL_SLACK = 256 * 2 ** 20;
const GPU_SLACK = 1 / 16;

export class BatchEngine implements Engine {
  readonly maxContext: number;
  readonly maxTokens: number;
  readonly maxBatch: number;
  readonly #source: TextSource;
  readonly #kernels: SparseOptions;
  readonly #limits: SequenceLimits;
  readonly #structured: StructuredOutput;
  readonly #cache: DecodeCache;
  readonly #prefixes: PrefixCache | null;
  readonly #scheduler: Scheduler;
  readonly #executor: Executor;
  /** Most bytes of unused memory between steps. */
  readonly #slack: number;
  readonly #options: Required<Omit<EngineOptions, `prefixCache${string}`>>;
  readonly #runsItself: boolean;
  readonly #waiting: Sequence[] = [];
  #running: Sequence[] = [];
  #waitingTokens = 0;
  #loop: Promise<void> | null = null;
  /** Ends the wait for files, if no request can do anything else. */
  #wake: () => void = () => {};
  #failure: unknown = null;
  #isClosed = false;

  /**
   * `runsItself`: computes while there are requests. Otherwise it computes a step when its caller asks (`advance`).
   * `openPrefixes`: null keeps no prefixes.
   */
  constructor(
    source: TextSource,
    options: EngineOptions,
    runsItself: boolean,
    openPrefixes: OpenPrefixes | null = null,
  ) {
    const { model, config, tokenizer } = source;
    this.#source = source;
    this.#runsItself = runsItself;
    this.#kernels = kernelOptions(config);
    const vocabulary = usedVocabulary(source);
    const endTokens = endTokensOf(source);
    this.#structured = new StructuredOutput(tokenizer, vocabulary, endTokens);
    const { speculate = 0 } = options;
    expectSpeculation(speculate, model.device.kind);
    this.#cache = new DecodeCache(model.device, model.shape, model.dtype, speculate);
    const { maxBatch = 32, maxContext = DEFAULT_MAX_CONTEXT, maxQueued = 256 } = options;
    const { tile = DEFAULT_TILE[model.device.kind], maxQueuedTokens = 8 * maxContext } = options;
    const { idleTile = tile * IDLE_TILES[model.device.kind] } = options;
    for (const [name, value] of Object.entries({ maxBatch, maxContext, tile, idleTile }))
      if (!Number.isSafeInteger(value) || value < 1)
        throw new UsageError(`${name}: ${value} is not a positive integer`);
    this.maxContext = maxContext;
    this.#limits = { vocabulary, endTokens, maxContext };
    const needed = maxBatch * this.#cache.mostBytes(maxContext, tile);
    const free = model.device.freeBytes();
    this.#slack = Math.max(POOL_SLACK, model.device.kind === 'cuda' ? GPU_SLACK * free : 0);
    const { cacheBytes = Math.min(needed, free / 2) } = options;
    const { prefixCacheBytes = openPrefixes ? Math.min(GIB, free / 4) : 0 } = options;
    this.maxBatch = maxBatch;
    this.maxTokens = longestWithin(cacheBytes, maxContext, (length) => this.#cache.mostBytes(length, tile));
    if (this.maxTokens < 2)
      throw new UsageError(`cacheBytes: ${mib(cacheBytes)} do not hold a request of two tokens; raise it (--cache-gb)`);
    this.#options = { maxBatch, maxContext, maxQueued, maxQueuedTokens, tile, idleTile, cacheBytes, speculate };
    if (isWithoutCache(this.#kernels) && (prefixCacheBytes > 0 || speculate > 0))
      throw new UsageError(
        'the engine keeps pages of prefixes, which the reference kernels do not write: unset NSA_FORCE_PARITY',
      );
    const isReading = () =>
      this.#waiting.length > 0 || this.#running.some(({ isWriting, isLoading }) => !isWriting || isLoading);
    const places = { model, kernels: this.#kernels, cache: this.#cache, tile, isReading };
    this.#prefixes = prefixCacheBytes > 0 ? (openPrefixes?.(places, prefixCacheBytes, options) ?? null) : null;
    if (!this.#prefixes && options.prefixCacheDir !== undefined)
      throw new UsageError('prefixCacheDir: needs memory for prefixes; raise prefixCacheBytes (--prefix-cache-gb)');
    const limits = { prefixes: this.#prefixes, tile, maxContext };
    this.#scheduler = new Scheduler({ ...limits, idleTile });
    const parts = { model, kernels: this.#kernels, cache: this.#cache, scheduler: this.#scheduler };
    this.#executor = new Executor({ ...limits, ...parts, vocabulary });
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

  /** `kept`: the pages that the request continues, if it begins with their tokens, and that it leaves behind. */
  listen(request: EngineRequest, sink: EventSink, kept: KeptPages | null = null): () => void {
    const { maxBatch, maxContext, maxQueued, maxQueuedTokens, tile, speculate } = this.#options;
    if (this.#isClosed || this.#failure)
      throw new RequestRefused('closed', this.#failure ? 'the engine failed' : 'the engine is closed');
    const checked = checkRequest(request, this.#limits.vocabulary);
    const { length } = checked.prompt;
    const { maxNewTokens } = checked;
    const refusal = refusalOf({ length, maxNewTokens }, this);
    if (refusal) throw new RequestRefused('too_large', refusal.message);
    const reserved = this.#cache.mostBytes(Math.min(maxContext, length + maxNewTokens), tile);
    const { responseFormat } = request;
    const budget = Math.min(checked.maxNewTokens, maxContext - length);
    const mask = responseFormat ? this.#structured.mask(responseFormat, budget) : null;
    const isFull = this.#waiting.length >= maxQueued + maxBatch - this.#running.length;
    if (isFull || (this.#waitingTokens > 0 && this.#waitingTokens + length > maxQueuedTokens))
      throw new RequestRefused('busy', `${this.#waiting.length} requests are waiting: try again later`);
    const sequence = new Sequence({
      request: mask ? { ...checked, mask: () => mask } : checked,
      limits: this.#limits,
      decoder: this.#source.tokenizer.createStreamDecoder(),
      sink,
      reserved,
      kept,
    });
    if (speculate > 0) sequence.drafts = new PromptLookup(sequence.context, speculate);
    const cancel = () => {
      sequence.isCancelled = true;
      this.#wake();
    };
    request.signal?.addEventListener('abort', cancel, { once: true });
    if (request.signal?.aborted) cancel();
    this.#waiting.push(sequence);
    this.#waitingTokens += length;
    if (this.#runsItself) this.#loop ??= this.#run();
    this.#wake();
    return cancel;
  }

  async warmUp(): Promise<void> {
    this.#warmUpHost();
    const { tile, idleTile } = this.#options;
    const isGpu = this.#source.model.device.kind === 'cuda';
    const sequence = this.#cache.sequence();
    try {
      // Tiles of a prompt, the first one and others, and its end; then steps, of which the second is recorded. A GPU chooses
      // kernels by the number of tokens, and its pool gets the memory of a tile.
      const counts = isGpu ? [idleTile, idleTile, tile, 1] : [8, 1];
      for (const count of counts) this.#readUnused(sequence, Math.min(count, this.maxContext - 1));
      this.#executor.warmUp(sequence, this.maxBatch);
      this.#source.model.device.synchronize();
    } finally {
      sequence.free();
    }
    const prompt = new Int32Array(1); // as servers submit it: code is compiled for what it has seen
    for (const temperature of [0, 1])
      for await (const _ of this.submit({ prompt, maxNewTokens: 2, sampling: { temperature } }));
    this.#structured.warmUp();
    await this.#prefixes?.warmUp();
  }

  /**
   * Runs the host's code for a long prompt and for logits until it is compiled: a first request would take many times
   * as long.
   */
  #warmUpHost(): void {
    const prompt = new Int32Array(Math.min(16_384, this.maxContext - 1));
    const logits = Float32Array.from({ length: this.#limits.vocabulary }, (_, i) => Math.sin(i));
    const samplers = [{ temperature: 0 }, {}, { topP: 0.9 }].map(createSampler);
    for (let i = 0; i < 20; i++) {
      checkRequest({ prompt }, this.#limits.vocabulary);
      const text = plainArray(prompt);
      this.#prefixes?.keys('', prompt, text).endKey(text.length);
      for (const sample of samplers) sample(logits, i);
      this.#source.tokenizer.createStreamDecoder().push(i % this.#limits.vocabulary);
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
      draftTokens: this.#executor.draftTokens,
      acceptedTokens: this.#executor.acceptedTokens,
    };
  }

  /** Cancels all requests: they end before the next step. */
  cancel(): void {
    for (const sequence of [...this.#waiting, ...this.#running]) sequence.isCancelled = true;
    this.#wake();
  }

  async close(): Promise<void> {
    this.#isClosed = true;
    this.cancel();
    if (this.#loop) await this.#loop;
    this.#dropCancelled();
    this.#executor.free();
    await this.#prefixes?.close();
  }

  /** Steps until no request is left. */
  async #run(): Promise<void> {
    await turn(); // requests that are submitted together start together
    while (this.#waiting.length + this.#running.length > 0 || this.#executor.launched) await this.advance();
    this.#loop = null;
  }

  /** Computes a step, and lets the event loop run: submissions, cancellations, output. Errors go to the requests. */
  async advance(): Promise<void> {
    try {
      this.#step();
    } catch (error) {
      this.#fail(error);
    }
    const isIdle = this.#running.length > 0 && this.#running.every(({ isLoading }) => isLoading);
    await (isIdle ? new Promise<void>((resolve) => (this.#wake = resolve)) : turn());
  }

  #fail(error: unknown): void {
    this.#failure = error;
    for (const sequence of [...this.#waiting.splice(0), ...this.#running]) sequence.release(error);
    this.#running = [];
    this.#executor.clear();
    this.#waitingTokens = 0;
  }

  #step(): void {
    if (this.#failure) throw this.#failure;
    this.#dropCancelled();
    this.#admit();
    const shares = this.#executor.launched ?? this.#scheduler.plan(this.#running);
    if (shares.length === 0) return;
    this.#executor.run(shares, this.#running.length + this.#waiting.length);
    this.#running = this.#running.filter(({ pages }) => pages !== null);
    const { pool } = this.#source.model.device;
    if (this.#hasReadPrompts(shares) || pool.bytesReserved - pool.bytesInUse > this.#slack) pool.trim();
  }

  /** Whether the step was the last that needs the memory of a prompt: a server reads the next one soon. */
  #hasReadPrompts(shares: readonly Share[]): boolean {
    const isLast = !this.#runsItself && this.#running.every(({ isWriting }) => isWriting);
    return isLast && shares.some(({ tokens, drafts }) => tokens.length - drafts > 1);
  }

  #dropCancelled(): void {
    for (let i = this.#waiting.length - 1; i >= 0; i--)
      if (this.#waiting[i].isCancelled) {
        const [sequence] = this.#waiting.splice(i, 1);
        this.#waitingTokens -= sequence.request.prompt.length;
        sequence.end('aborted');
      }
    for (const sequence of this.#running) if (sequence.isCancelled && sequence.pages) sequence.end('aborted');
    this.#running = this.#running.filter(({ pages }) => pages !== null);
  }

  /** Bytes of pages that the running requests can need. */
  get #reserved(): number {
    return this.#running.reduce((sum, { pages, reserved }) => sum + (pages ? reserved : 0), 0);
  }

  /** Starts waiting requests in their order while there are places and memory. */
  #admit(): void {
    const { maxBatch, cacheBytes } = this.#options;
    while (this.#waiting.length > 0 && this.#running.length < maxBatch) {
      const [sequence] = this.#waiting;
      if (this.#reserved + sequence.reserved > cacheBytes) return;
      this.#waiting.shift();
      this.#waitingTokens -= sequence.request.prompt.length;
      try {
        sequence.prepare();
      } catch (error) {
        sequence.release(error); // the caller's function: its request fails, not the engine
        continue;
      }
      this.#start(sequence);
    }
  }

  #start(sequence: Sequence): void {
    const { prompt, promptLogprobs, cacheSalt } = sequence.request;
    const keys = this.#prefixes?.keys(cacheSalt, prompt, sequence.context) ?? null;
    sequence.keys = keys;
    const kept = sequence.kept?.pages;
    if (sequence.kept) sequence.kept.pages = null;
    const found = kept ?? (promptLogprobs === null && keys ? this.#prefixes?.longest(keys, prompt.length) : null);
    const pages = found ?? this.#cache.sequence();
    this.#running.push(sequence);
    sequence.start(pages);
    const prefixes = promptLogprobs === null && this.#prefixes?.files ? this.#prefixes : null;
    // Files continue whole blocks.
    if (kept || !prefixes?.isLong(prompt.length) || pages.length >= prompt.length - 1) return;
    sequence.storesLogits = true;
    void this.#load(prefixes, sequence, pages);
  }

  /**
   * Begins the answer with the logits of a file if the whole prompt is a repeat, and continues the cached part of the prompt
   * with blocks from files; the request takes part in steps again after that.
   */
  async #load(prefixes: PrefixCache, sequence: Sequence, pages: CachedSequence): Promise<void> {
    const isWanted = () => sequence.pages === pages;
    const { keys, request } = sequence;
    const { length } = request.prompt;
    if (!keys) return;
    sequence.isLoading = true;
    try {
      const logits = await prefixes.loadLogits(keys, length, this.#limits.vocabulary);
      if (logits && isWanted()) {
        sequence.beginWith(logits);
        await turn(); // the token leaves before files are opened
      }
      if (isWanted()) await prefixes.load(keys, length, pages, isWanted);
    } catch (error) {
      this.#failure ??= error;
    }
    sequence.isLoading = false;
    this.#wake();
    if (!isWanted() || (!sequence.isWriting && pages.length === sequence.cachedTokens)) return;
    sequence.cachedTokens = pages.length;
    if (!sequence.isWriting) sequence.progress();
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

function mib(bytes: number): string {
  return `${Math.ceil(bytes / 2 ** 20)} MiB`;
}

/** A queue of events between the engine, which never waits, and one reader. */
class Channel<Event> implements AsyncIterable<Event> {
  readonly #onReturn: () => void;
  readonly #events: Event[] = [];
  #wake: (() => void) | null = null;
  #isEnded = false;
  #error: unknown = null;

  /** `onReturn` is called when the reader stops before the end. */
  constructor(onReturn: () => void) {
    this.#onReturn = onReturn;
  }

  push(event: Event): void {
    this.#events.push(event);
    this.#wake?.();
  }

  /** No event follows. With an error the reader throws it after the last event. */
  end(error: unknown = null): void {
    this.#isEnded = true;
    this.#error = error;
    this.#wake?.();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Event, void, void> {
    try {
      for (;;) {
        while (this.#events.length > 0) yield this.#events.shift() as Event;
        if (this.#isEnded) break;
        await new Promise<void>((resolve) => {
          this.#wake = resolve;
        });
        this.#wake = null;
      }
      if (this.#error !== null) throw this.#error;
    } finally {
      if (!this.#isEnded) this.#onReturn();
    }
  }
}
