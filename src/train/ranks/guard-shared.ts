/** Memory shared by the two threads of guard.ts: 32-bit words, followed by the run's folder as text. */
import type { WorldMember } from './monitor.js';

/**
 * Index of each word. `gone`: rank + 1 of the rank whose lifeline has closed, or 0. `silent`: rank + 1 of the rank that has
 * sent no heartbeat for the whole time limit, or 0.
 */
export const WORDS = { phase: 0, moves: 1, isClosed: 2, folderBytes: 3, gone: 4, silent: 5, count: 6 } as const;

/** The rank stored in one of these words; null if none is. */
export function rankIn(words: Int32Array, word: number): number | null {
  const value = Atomics.load(words, word);
  return value === 0 ? null : value - 1;
}

export const FOLDER_AT = 32;
export const FOLDER_BYTES = 4096;
export const PHASES = ['idle', 'join', 'exchange', 'leave'] as const;

export interface GuardOptions {
  readonly rank: number;
  /** In order of rank. */
  readonly members: readonly WorldMember[];
  /** How long the other ranks wait for a rank. */
  readonly timeoutSeconds: number;
  /** Milliseconds without progress after which the guard looks for a lost rank; until then the main thread does. */
  readonly quietMs?: number;
  /** Milliseconds that leaving NCCL may take. */
  readonly leaveMs?: number;
  /** Ports for the lifelines of rank 0, tried in order. Without ports there are no lifelines. */
  readonly ports?: readonly number[];
  /** Addresses of rank 0's machine, in the order in which other ranks try them. Used by rank 0 only. */
  readonly addresses?: readonly string[];
  /** HMAC key of the run, with which lifelines are authenticated. */
  readonly key: string;
}

/** Where rank 0 listens for lifelines. */
export interface Lifeline {
  readonly addresses: readonly string[];
  readonly port: number;
}

export interface GuardTask extends Required<GuardOptions> {
  readonly shared: SharedArrayBuffer;
}
