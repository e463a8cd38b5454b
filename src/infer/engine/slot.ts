/** The state of one request in the engine, and its part of a step. */
import type { CachedSequence } from '../../model/cache.js';
import type { GeneratedSequence } from '../generate.js';
import type { PromptLookup } from './drafts.js';
import type { EventSink } from './interface.js';
import type { PrefixName } from './prefix-name.js';
import type { CheckedRequest, PositionLogprobs, TokenMask } from './request.js';

/** A request in the engine. */
export interface Slot {
  readonly request: CheckedRequest;
  readonly sequence: GeneratedSequence;
  readonly sink: EventSink;
  readonly reserved: number;
  readonly submittedAt: number;
  readonly promptLogprobs: PositionLogprobs[];
  /** Null while the request waits. */
  cached: CachedSequence | null;
  /** Of its text in the prefix cache; null while it waits, and without such a cache. */
  name: PrefixName | null;
  mask: TokenMask | null;
  readonly lookup: PromptLookup | null;
  startedAt: number;
  readAt: number;
  cachedTokens: number;
  isCancelled: boolean;
  /** While the beginning of the prompt is read from files. */
  isLoading: boolean;
  /** Whether the logits after the prompt, which no file has yet, are to be stored. */
  storesLogits: boolean;
}

/** What a step reads for one request. */
export interface Share {
  readonly slot: Slot;
  readonly cached: CachedSequence;
  readonly tokens: readonly number[];
  /** Number of its last tokens that are guesses. */
  readonly drafts: number;
  /** Number of its last tokens whose logits are needed. */
  readonly rows: number;
}
