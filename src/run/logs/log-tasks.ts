/** Shared by the log thread (log-thread.ts) and its worker (log-worker.ts): messages, and a few words of memory. */
import type { LogFormat, OpenFile } from './log.js';

/** Indices into the shared words. */
export const WORDS = {
  /** Tasks the worker has finished. */
  done: 0,
  /** Records that were posted and not yet written. */
  queued: 1,
  /** 1 if the last flush succeeded. */
  flushed: 2,
  /** Records that the sink of each file has dropped: one word per file, from here on. */
  drops: 3,
} as const;
export const MAX_FILES = 16;

export type LogTask =
  | { readonly kind: 'open'; readonly file: number; readonly opened: OpenFile; readonly format: LogFormat }
  /** `at`: when the record was made, in milliseconds since 1970. */
  | { readonly kind: 'write'; readonly file: number; readonly record: unknown; readonly at: number }
  | { readonly kind: 'flush' | 'close'; readonly file: number };

export interface LogWorkerData {
  readonly shared: SharedArrayBuffer;
  /** Problems go back here, as one line each. */
  readonly problems: { postMessage(line: string): void };
}
