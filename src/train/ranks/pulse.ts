/**
 * Heartbeats between the guards of all ranks. A process that is stopped, by a signal or with its machine, keeps its
 * connections open, but none of its threads runs, so its guard sends nothing. The guard of a running process sends
 * heartbeats however busy the main thread is.
 *
 * Every rank sends heartbeats to rank 0 and rank 0 to every rank, each with the rank that has been silent longest.
 */
import type { Socket } from 'node:net';
import { type Line, sendLine } from './channel.js';

/** A rank, and how long ago its last heartbeat was. */
export interface Silence {
  readonly rank: number;
  readonly ms: number;
}

interface Other {
  readonly rank: number;
  silentMs: number;
  /** The longest silence that rank 0 has reported. */
  missed: Silence | null;
}

export class Pulse {
  readonly #beatMs: number;
  readonly #onBeat: (longest: Silence | null) => void;
  readonly #others = new Map<Socket, Other>();
  #last = performance.now();

  /** `onBeat` is called at each heartbeat with the longest silence; null if no connection is followed. */
  constructor(beatMs: number, onBeat: (longest: Silence | null) => void) {
    this.#beatMs = beatMs;
    this.#onBeat = onBeat;
    setInterval(() => this.#beat(), beatMs).unref();
  }

  /** Exchanges heartbeats with `rank` over `socket`. Returns the handler of the lines it sends. */
  follow(rank: number, socket: Socket): (line: Line) => void {
    const other: Other = { rank, silentMs: 0, missed: null };
    this.#others.set(socket, other);
    // A closed connection is not silence: if the process has exited, its lifeline shows that.
    socket.once('close', () => this.#others.delete(socket));
    return ({ missed }) => {
      other.silentMs = 0;
      if (rank === 0) other.missed = isSilence(missed) ? missed : null;
    };
  }

  #beat(): void {
    const now = performance.now();
    const passed = Math.min(now - this.#last, 2 * this.#beatMs); // while this process was stopped it received nothing
    this.#last = now;
    const others = [...this.#others.values()];
    for (const other of others) other.silentMs += passed;
    const own = longest(others.map(({ rank, silentMs }) => ({ rank, ms: silentMs })));
    this.#onBeat(longest([own, ...others.map(({ missed }) => missed)]));
    // Nothing is queued for a peer that does not read.
    for (const socket of this.#others.keys()) if (socket.writableLength === 0) sendLine(socket, { missed: own });
  }
}

function longest(silences: readonly (Silence | null)[]): Silence | null {
  return silences.reduce((most, one) => ((one?.ms ?? -1) > (most?.ms ?? -1) ? one : most), null);
}

function isSilence(value: unknown): value is Silence {
  if (typeof value !== 'object' || value === null) return false;
  const { rank, ms } = value as Record<string, unknown>;
  return Number.isSafeInteger(rank) && typeof ms === 'number';
}
