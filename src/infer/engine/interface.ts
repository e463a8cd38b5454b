/** Interface of an engine: its limits, its state, and the calls of its users. `engine.ts` implements it. */
import type { EngineEvent, EngineRequest } from './request.js';

/** Limits of an engine. */
export interface EngineOptions {
  /** Requests that are computed at the same time. Default 32. */
  readonly maxBatch?: number;
  /** Maximum tokens of a request, prompt included. Default 32,768. */
  readonly maxContext?: number;
  /** Requests that may wait. Default 256. */
  readonly maxQueued?: number;
  /** Tokens of prompts that may wait, without those that run. Default 8 times `maxContext`. */
  readonly maxQueuedTokens?: number;
  /** Tokens of prompts that one step reads. Default 256 on the CPU, 2048 on CUDA. */
  readonly tile?: number;
  /** The same while no request generates. Default: `tile` on the CPU, 4 times `tile` on CUDA. */
  readonly idleTile?: number;
  /** Device memory for the pages of requests. Default: what `maxBatch` requests can need, at most half of what is free. */
  readonly cacheBytes?: number;
  /** Memory for prefixes of earlier requests; 0 disables the prefix cache. Default 1 GiB, at most a quarter of the free memory. */
  readonly prefixCacheBytes?: number;
  /** Folder that prefixes are also written to, to be found after a restart and by other processes. Default: none. */
  readonly prefixCacheDir?: string;
  /** Maximum bytes of the files in it; the least recently used are deleted first. Default 16 GiB. */
  readonly prefixCacheDirBytes?: number;
  /**
   * Speculative decoding: the most tokens of a request that are guessed from its own text and checked in one step. The
   * tokens are the same as without, bit for bit. On the CPU only. Default 0: off.
   */
  readonly speculate?: number;
}

/** The state of an engine at one moment. */
export interface EngineStats {
  readonly running: number;
  readonly waiting: number;
  /** Bytes of all pages, those of cached prefixes included. */
  readonly pageBytes: number;
  /** Bytes reserved by running requests, and the most they may reserve. */
  readonly reservedBytes: number;
  readonly cacheBytes: number;
  /** Tokens of prompts that were looked up in the prefix cache, and those found. */
  readonly prefixQueries: number;
  readonly prefixHits: number;
  /** Those of the found tokens that were read from `prefixCacheDir`, and the bytes of its files. */
  readonly prefixFileHits: number;
  readonly prefixFileBytes: number;
  /** Damaged files that were deleted, and reads and writes that the file system refused. */
  readonly prefixFilesDamaged: number;
  readonly prefixFileErrors: number;
  /** Tokens that were guessed (`speculate`), and those of them that were right. */
  readonly draftTokens: number;
  readonly acceptedTokens: number;
}

/** Statistics of an engine that has had no request. */
export const IDLE_STATS: EngineStats = {
  running: 0,
  waiting: 0,
  pageBytes: 0,
  reservedBytes: 0,
  cacheBytes: 1,
  prefixQueries: 0,
  prefixHits: 0,
  prefixFileHits: 0,
  prefixFileBytes: 0,
  prefixFilesDamaged: 0,
  prefixFileErrors: 0,
  draftTokens: 0,
  acceptedTokens: 0,
};

/** Takes the events of a request. */
export interface EventSink {
  /** Takes the next event of the request, in the order of `EngineEvent`. */
  push(event: EngineEvent): void;
  /** No event follows; with an error the request has failed. */
  end(error?: unknown): void;
}

/** Continuous batching on one model. */
export interface Engine {
  /** Maximum tokens of a request, prompt included. */
  readonly maxContext: number;
  /** Longest text, prompt included, for which there is memory; at most `maxContext`. */
  readonly maxTokens: number;
  readonly maxBatch: number;
  /** Why the engine failed; null while all is well. */
  readonly failure: string | null;
  /** Starts a request. Throws `RequestRefused` or `UsageError` at once; leaving the iteration cancels the request. */
  submit(request: EngineRequest): AsyncIterable<EngineEvent>;
  /** As `submit`, with events that go to `sink` as they happen. Returns a function that cancels the request. */
  listen(request: EngineRequest, sink: EventSink): () => void;
  /** Runs the model and answers a request of one token, so that the first request does not wait for code to be compiled. */
  warmUp(): Promise<void>;
  /** Requests, memory and cache hits now. */
  stats(): EngineStats;
  /** Cancels all requests, completes the files of `prefixCacheDir` and frees the cache. The model is the caller's. */
  close(): Promise<void>;
}
