/**
 * Connections that show that a process has exited: every rank holds one to rank 0, which reports a closed connection to all
 * others. They belong to the guard's thread, whose event loop runs while the main thread waits for a GPU.
 *
 * A lifeline carries no data while all ranks run. Only on an idle connection does the system send keep-alive probes, and
 * close it within half a minute if the other machine does not answer. Heartbeats (pulse.ts) therefore use a second
 * connection.
 */
import type { Socket } from 'node:net';
import { Channel, connectTo, type Line, listen, type Peer, sendLine } from './channel.js';
import type { Lifeline } from './guard-shared.js';
import type { Pulse } from './pulse.js';

/** Time limit for an address: a network that drops packets reports no error. */
const CONNECT_MS = 5000;

export type OnGone = (rank: number) => void;

interface OfferOptions {
  /** Addresses of this machine, as the other ranks may reach it. */
  readonly addresses: readonly string[];
  /** Tried in order; 0 is any free port. */
  readonly ports: readonly number[];
  readonly world: number;
  /** HMAC key of the run. */
  readonly key: string;
}

/**
 * Rank 0's end. Listens on the first free port until every rank has connected; returns null if no port is free. `onGone` is
 * called with each rank whose lifeline closes.
 */
export async function offerLifeline(
  { addresses, ports, world, key }: OfferOptions,
  onGone: OnGone,
  pulse: Pulse,
): Promise<Lifeline | null> {
  const held = new Map<number, Socket>();
  const beating = new Set<number>();
  const admit = (hello: Line, socket: Socket): Peer | string => {
    const rank = Number(hello['rank']);
    const isPulse = hello['pulse'] === true;
    if (!Number.isSafeInteger(rank) || rank < 1 || rank >= world) return `rank ${rank} is not below the world size`;
    if (isPulse ? beating.has(rank) : held.has(rank)) return `rank ${rank} has already connected`;
    if (isPulse) beating.add(rank);
    else held.set(rank, socket);
    if (held.size === world - 1 && beating.size === world - 1) listener?.close();
    if (isPulse) return { onLine: pulse.follow(rank, socket), onClose: () => {} };
    return {
      onLine: () => {},
      onClose: () => {
        held.delete(rank);
        for (const other of held.values()) sendLine(other, { gone: rank });
        onGone(rank);
      },
    };
  };
  const listener = await listen({ service: 'lifeline', key, ports, address: addresses[0], expected: 2 * world, admit });
  return listener && { addresses, port: listener.port };
}

/**
 * Any other rank's end. `onGone` is called with each rank that exits, also with rank 0. Resolves when rank 0 monitors this
 * rank, or when it cannot be reached: then only the run's files, NCCL's errors and the time limit show a lost rank.
 */
export async function holdLifeline(
  rank: number,
  { addresses, port, key }: Lifeline & { readonly key: string },
  onGone: OnGone,
  pulse: Pulse,
): Promise<void> {
  const reach = async (hello: object): Promise<Channel | null> => {
    for (const host of addresses) {
      const found = await connectTo({ host, port, service: 'lifeline', key, hello, timeoutMs: CONNECT_MS });
      if (found instanceof Channel) return found;
    }
    return null;
  };
  const [beats, news] = await Promise.all([reach({ rank, pulse: true }), reach({ rank })]);
  beats?.listen(pulse.follow(0, beats.socket), () => {});
  news?.listen(
    (line) => Number.isSafeInteger(line['gone']) && onGone(line['gone'] as number),
    () => onGone(0),
  );
}
