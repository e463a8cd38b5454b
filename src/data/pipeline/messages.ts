/** Messages between the trainer's thread and its workers. Samples go through shared memory. */

import type { MessagePort } from 'node:worker_threads';
import type { Cursor, Side } from '../sources/documents.js';
import type { CorpusSpec } from '../sources/spec.js';
import type { Failure } from './failure.js';
import type { RingMemory } from './ring.js';

/** The program of the worker threads (worker.ts). */
export const WORKER_MODULE = new URL('./worker.js', import.meta.url);

export interface LaneTask {
  /** Number of the lane in the corpus, and of its ring. */
  readonly lane: number;
  readonly ring: number;
  readonly side: Side;
  readonly cursor: Cursor;
}

export interface StreamTask {
  readonly kind: 'stream';
  readonly worker: number;
  /** A separate channel, which the trainer can read synchronously. */
  readonly port: MessagePort;
  readonly spec: CorpusSpec;
  readonly lanes: readonly LaneTask[];
  readonly ring: RingMemory;
  readonly tokenizer: string;
  readonly documentBatch: number;
  readonly fetchAhead: boolean;
}

export interface BaselineTask {
  readonly kind: 'baseline';
  readonly spec: CorpusSpec;
  readonly tokenizer: string;
  readonly seconds: number;
  readonly worker: number;
  readonly workers: number;
  /** Becomes 1 when all threads start. */
  readonly go: SharedArrayBuffer;
}

export type WorkerTask = StreamTask | BaselineTask;

export type FromWorker =
  | Failure
  | { readonly kind: 'news' }
  | { readonly kind: 'ready' }
  | { readonly kind: 'rate'; readonly tokens: number; readonly bytes: number; readonly seconds: number };
