/** What the two threads of guard.ts share: 32-bit words, and behind them the folder of the run as text. */
import type { Member } from './monitor.js';

/**
 * `gone`: one more than the rank whose lifeline has ended; 0 while none has. `silent`: one more than the rank that was not
 * heard for the whole time limit; 0 while all are.
 */
export const WORDS = { phase: 0, moves: 1, isClosed: 2, folderBytes: 3, gone: 4, silent: 5, count: 6 } as const;

/** The rank that one of these words tells. */
export function rankIn(words: Int32Array, word: number): number | null {
  const value = Atomics.load(words, word);
  return value === 0 ? null : value - 1;
}

export const FOLDER_AT = 32;
export const FOLDER_MOST = 4096;
export const PHASES = ['idle', 'join', 'exchange', 'leave'] as const;

export interface GuardOptions {
  readonly rank: number;
  /** By rank. */
  readonly members: readonly Member[];
  /** How long a rank may keep the others waiting. */
  readonly timeoutSeconds: number;
  /** How long the other thread may be quiet before somebody is looked for: it looks by itself as long as it can. */
  readonly quietMs?: number;
  /** How long the orderly end may take. */
  readonly leaveMs?: number;
  /** Where rank 0 may listen, in the order in which ports are tried; left out, there are no lifelines. */
  readonly ports?: readonly number[];
  /** Those of rank 0's machine, in the order in which they are tried. Only rank 0 needs them. */
  readonly addresses?: readonly string[];
}

/** Where rank 0 holds the lifelines, and what proves that a rank belongs to it. */
export interface Lifeline {
  readonly addresses: readonly string[];
  readonly port: number;
  readonly token: string;
}

export interface GuardTask extends Required<GuardOptions> {
  readonly shared: SharedArrayBuffer;
}
