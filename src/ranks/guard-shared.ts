/** What the two threads of guard.ts share: 32-bit words, and behind them the folder of the run as text. */
import type { Member } from './monitor.js';

export const WORDS = { phase: 0, moves: 1, isClosed: 2, folderBytes: 3, count: 4 } as const;
export const FOLDER_AT = 4 * WORDS.count;
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
}

export interface GuardTask extends Required<GuardOptions> {
  readonly shared: SharedArrayBuffer;
}
