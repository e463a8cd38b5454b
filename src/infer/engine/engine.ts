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
import { DEFAULT_MAX_CONTEXT, GeneratedSequence, StopFilter, type TextSource, usedVocabulary } from '../generate.js';
import { createSampler } from '../sampler.js';
import { StructuredOutput } from '../structured/structured-output.js';
import { Answers } from './answers.js';
import { Channel } from './channel.js';
import { warmUpSteps } from './device-steps.js';
import { PromptLookup } from './drafts.js';
import { modelFingerprint } from './fingerprint.js';
import type { Engine, EngineOptions, EngineStats, EventSink } from './interface.js';
import { PrefixCache, prefixBlock } from './prefix-cache.js';
import { PrefixFiles } from './prefix-files.js';
import { type CheckedRequest, checkRequest, type EngineEvent, type EngineRequest, RequestRefused } from './request.js';
import type { Slot } from './slot.js';
import { StepPlanner } from './step-planner.js';
import { StepRunner } from './step-runner.js';

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
  readonly #planner: StepPlanner;
  readonly #runner: StepRunner;
  readonly #answers: Answers;
  /** Most bytes of unused memory between steps. */
  readonly #slack: number;
  readonly #options: Required<Omit<EngineOptions, `prefixCache${string}`>>;
  readonly #waiting: Slot[] = [];
  #running: Slot[] = [];
  #waitingTokens = 0;
  #reserved = 0;
  #loop: Promise<void> | null = null;
  /** Ends the wait for files, if no request can do anything else. */
  #wake: () => void = () => {};
  #failure: unknown = null;
  #isClosed = false;

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
    const prefixes = this.#prefixes;
    this.#planner = new StepPlanner({ prefixes, tile, idleTile, maxContext });
    const limits = { prefixes, maxContext, endTokens: this.#endTokens };
    const onFreed = ({ reserved }: Slot) => {
      this.#reserved -= reserved;
    };
    this.#answers = new Answers({ ...limits, vocabulary: this.#vocabulary, onFreed });
    this.#runner = new StepRunner({
      ...limits,
      model,
      kernels: this.#kernels,
      decoder: this.#decoder,
      planner: this.#planner,
      answers: this.#answers,
      tile,
    });
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
      if (this.#decoder) warmUpSteps(this.#decoder, sequence, this.maxBatch);
      this.#source.model.device.synchronize();
    } finally {
      sequence.free();
    }
    const prompt = new Int32Array(1); // as servers submit it: code is compiled for what it has seen
    for (const temperature of [0, 1])
      for await (const _ of this.submit({ prompt, maxNewTokens: 2, sampling: { temperature } }));
    await this.#prefixes?.warmUp();
  }

  /** What the host does with a long prompt and with logits, until it is compiled: a first request would take many times as long. */
  #warmUpHost(): void {
    const prompt = new Int32Array(Math.min(16_384, this.maxContext - 1));
    const logits = Float32Array.from({ length: this.#vocabulary }, (_, i) => Math.sin(i));
    const samplers = [{ temperature: 0 }, {}, { topP: 0.9 }].map(createSampler);
    for (let i = 0; i < 20; i++) {
      checkRequest({ prompt }, this.#vocabulary);
      const text = plainArray(prompt);
      this.#prefixes?.name('', prompt, text).endKey(text.length);
      for (const sample of samplers) sample(logits, i);
      this.#source.tokenizer.createStreamDecoder().push(i % this.#vocabulary);
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
      draftTokens: this.#answers.draftTokens,
      acceptedTokens: this.#answers.acceptedTokens,
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
      while (this.#waiting.length + this.#running.length > 0 || this.#runner.launched) {
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
    for (const slot of [...this.#waiting.splice(0), ...this.#running]) this.#answers.release(slot, error);
    this.#running = [];
    this.#runner.clear();
    this.#waitingTokens = 0;
  }

  #step(): void {
    if (this.#failure) throw this.#failure;
    this.#dropCancelled();
    this.#admit();
    const shares = this.#runner.launched ?? this.#planner.plan(this.#running);
    if (shares.length === 0) return;
    this.#runner.run(shares, this.#running.length + this.#waiting.length);
    this.#running = this.#running.filter(({ cached }) => cached !== null);
    const { pool } = this.#source.model.device;
    if (pool.bytesReserved - pool.bytesInUse > this.#slack) pool.trim();
  }

  #dropCancelled(): void {
    for (let i = this.#waiting.length - 1; i >= 0; i--)
      if (this.#waiting[i].isCancelled) {
        const [slot] = this.#waiting.splice(i, 1);
        this.#waitingTokens -= slot.request.prompt.length;
        this.#answers.end(slot, 'aborted');
      }
    for (const slot of this.#running) if (slot.isCancelled) this.#answers.end(slot, 'aborted');
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
        this.#answers.release(slot, error); // the caller's function: its request fails, not the engine
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
    if (slot.cachedTokens > 0) this.#answers.progress(slot);
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
      if (logits && isWanted()) {
        this.#answers.beginWith(slot, logits);
        await setImmediate(); // the token leaves before files are opened
      }
      if (isWanted()) await prefixes.load(name, length, cached, isWanted);
    } catch (error) {
      this.#failure ??= error;
    }
    slot.isLoading = false;
    this.#wake();
    if (!isWanted() || (slot.readAt === 0 && cached.length === slot.cachedTokens)) return;
    slot.cachedTokens = cached.length;
    if (slot.readAt === 0) this.#answers.progress(slot);
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
