/**
 * Whether the processes of other ranks run. A process that is stopped, by a signal or with its machine, keeps its connections;
 * but all its threads stand still, and its guard's thread says nothing any more. One that works goes on saying that it is there,
 * however busy its other thread is.
 *
 * Every rank beats to rank 0 and rank 0 to every rank, each time with the name of whom it misses most.
 */
import type { Socket } from 'node:net';
import { sendLine } from './store-wire.js';

/** A rank that has not been heard for so long. */
export interface Silence {
  readonly rank: number;
  readonly ms: number;
}

interface Other {
  readonly rank: number;
  silentMs: number;
  /** Whom rank 0 misses. */
  missed: Silence | null;
}

export class Pulse {
  readonly #beatMs: number;
  readonly #onBeat: (longest: Silence | null) => void;
  readonly #others = new Map<Socket, Other>();
  #last = performance.now();

  /** `onBeat` hears at each beat who has been silent longest; null when there is nobody to listen to. */
  constructor(beatMs: number, onBeat: (longest: Silence | null) => void) {
    this.#beatMs = beatMs;
    this.#onBeat = onBeat;
    setInterval(() => this.#beat(), beatMs).unref();
  }

  /** `rank` is at the other end of the connection. Returns what takes its lines. */
  follow(rank: number, socket: Socket): (line: Record<string, unknown>) => void {
    const other: Other = { rank, silentMs: 0, missed: null };
    this.#others.set(socket, other);
    // A connection that has ended tells nothing: if the process has, the lifeline does.
    socket.once('close', () => this.#others.delete(socket));
    return ({ missed }) => {
      other.silentMs = 0;
      if (rank === 0) other.missed = isSilence(missed) ? missed : null;
    };
  }

  #beat(): void {
    const now = performance.now();
    const passed = Math.min(now - this.#last, 2 * this.#beatMs); // while this process was stopped it could hear nobody
    this.#last = now;
    const others = [...this.#others.values()];
    for (const other of others) other.silentMs += passed;
    const own = longest(others.map(({ rank, silentMs }) => ({ rank, ms: silentMs })));
    this.#onBeat(longest([own, ...others.map(({ missed }) => missed)]));
    // Nothing is piled up for one that does not read.
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
