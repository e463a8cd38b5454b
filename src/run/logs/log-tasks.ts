/** What the log thread (log-thread.ts) and its worker (log-worker.ts) share: messages, and a few words of memory. */

/** Indices into the shared words. */
export const WORDS = {
  /** Tasks the worker has finished. */
  done: 0,
  /** Records, and their bytes, that were posted and not yet written. */
  queuedRecords: 1,
  queuedBytes: 2,
  /** 1 if the last flush succeeded. */
  flushed: 3,
  /** Records that the sink of each file has dropped: one word per file, from here on. */
  drops: 4,
} as const;
export const MAX_FILES = 16;

/** `append` files grow by records; a `replace` file holds one record, which each write replaces and `close` removes. */
export type FileMode = 'append' | 'replace';

export type LogTask =
  | {
      readonly kind: 'open';
      readonly file: number;
      readonly mode: FileMode;
      readonly descriptor: number;
      readonly path: string;
    }
  | { readonly kind: 'write'; readonly file: number; readonly bytes: Uint8Array }
  | { readonly kind: 'flush' | 'close'; readonly file: number };

export interface LogWorkerData {
  readonly shared: SharedArrayBuffer;
  /** Problems go back here, as one line each. */
  readonly problems: { postMessage(line: string): void };
}
