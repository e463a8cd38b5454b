/**
 * Connections by which ranks hear that a process has ended: every rank holds one to rank 0, which passes the news on. Used
 * on the guard's thread, whose event loop is free while the other thread waits for a GPU.
 *
 * Nothing goes over a lifeline as long as all is well: only then does the system ask whether the other machine is there, and
 * end the connection within half a minute when it is not. So the beats of pulse.ts have a connection of their own.
 */
import { randomBytes, timingSafeEqual } from 'node:crypto';
import { type AddressInfo, connect, createServer, type Server, type Socket } from 'node:net';
import type { Lifeline } from './guard-shared.js';
import type { Pulse } from './pulse.js';
import { isLoopback, readLines, sendLine } from './store-wire.js';

const LONGEST_LINE = 1024;
const HELLO_MS = 10_000;
/** An address of another network may swallow what is sent there. */
const CONNECT_MS = 5000;
const SPARE_CONNECTIONS = 64;

export type OnGone = (rank: number) => void;

/** Rank 0's end: listens on the first free port, of which 0 is any; null when none is. The others find it at `addresses`. */
export async function offerLifeline(
  { addresses, ports, world }: Pick<Lifeline, 'addresses'> & { ports: readonly number[]; world: number },
  onGone: OnGone,
  pulse: Pulse,
): Promise<Lifeline | null> {
  const token = randomBytes(32).toString('hex');
  const held = new Map<number, Socket>();
  const server = createServer((socket) => greet(socket, { token, held, onGone, pulse }));
  server.maxConnections = 2 * world + SPARE_CONNECTIONS;
  for (const port of ports)
    if (await listens(server, port, addresses[0]))
      return { addresses, port: (server.address() as AddressInfo).port, token };
  return null;
}

interface Offered {
  readonly token: string;
  /** By rank. */
  readonly held: Map<number, Socket>;
  readonly onGone: OnGone;
  readonly pulse: Pulse;
}

function greet(socket: Socket, { token, held, onGone, pulse }: Offered): void {
  let rank: number | null = null;
  let hear: ReturnType<Pulse['follow']> | null = null;
  prepare(socket);
  sendLine(socket, { lifeline: true }); // ranks of another run that look for their store here need not wait
  const timer = setTimeout(() => socket.destroy(), HELLO_MS);
  readLines(
    socket,
    () => LONGEST_LINE,
    (line) => {
      clearTimeout(timer);
      if (hear) return hear(line);
      if (rank !== null || !Number.isSafeInteger(line['rank']) || !isSame(token, line['token'])) {
        socket.destroy();
        return;
      }
      rank = line['rank'] as number;
      if (line['pulse'] === true) hear = pulse.follow(rank, socket);
      else held.set(rank, socket);
    },
  );
  socket.on('close', () => {
    clearTimeout(timer);
    if (rank === null || held.get(rank) !== socket) return;
    held.delete(rank);
    for (const other of held.values()) sendLine(other, { gone: rank });
    onGone(rank);
  });
}

/** The end of any other rank. `onGone` hears of rank 0 too. Resolves when rank 0 can hear this one, or never will. */
export async function holdLifeline(rank: number, lifeline: Lifeline, onGone: OnGone, pulse: Pulse): Promise<void> {
  const { token } = lifeline;
  const beats = reach(lifeline, (socket) => {
    sendLine(socket, { rank, token, pulse: true });
    return pulse.follow(0, socket);
  });
  const news = reach(lifeline, (socket) => {
    sendLine(socket, { rank, token });
    socket.once('close', () => onGone(0));
    return (line) => Number.isSafeInteger(line['gone']) && onGone(line['gone'] as number);
  });
  await Promise.all([beats, news]);
}

/**
 * Connects to the first address at which there are lifelines; `onGreeted` returns what takes the lines. One that is never
 * reached tells nothing: then the files, NCCL's errors and the time must do.
 */
async function reach({ addresses, port }: Lifeline, onGreeted: OnGreeted): Promise<void> {
  for (const host of addresses) if (await reachAt(host, port, onGreeted)) return;
}

type OnGreeted = (socket: Socket) => (line: Record<string, unknown>) => void;

function reachAt(host: string, port: number, onGreeted: OnGreeted): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = connect({ host, port });
    prepare(socket);
    let hear: ReturnType<OnGreeted> | null = null;
    const timer = setTimeout(() => socket.destroy(), CONNECT_MS);
    readLines(
      socket,
      () => LONGEST_LINE,
      (line) => {
        if (hear) return hear(line);
        clearTimeout(timer);
        if (line['lifeline'] !== true) {
          socket.destroy(); // another program
          return;
        }
        hear = onGreeted(socket);
        resolve(true);
      },
    );
    socket.once('close', () => {
      clearTimeout(timer);
      resolve(false); // nothing new for one that was greeted
    });
  });
}

function prepare(socket: Socket): void {
  socket.setNoDelay(true);
  socket.setKeepAlive(true, 10_000);
  socket.on('error', () => {}); // 'close' follows and says all there is to say
}

function isSame(token: string, given: unknown): boolean {
  return (
    typeof given === 'string' &&
    given.length === token.length &&
    timingSafeEqual(Buffer.from(given), Buffer.from(token))
  );
}

function listens(server: Server, port: number, address: string): Promise<boolean> {
  return new Promise((resolve) => {
    const failed = () => {
      server.off('listening', listening);
      resolve(false);
    };
    const listening = () => {
      server.off('error', failed);
      resolve(true);
    };
    server.once('error', failed);
    server.once('listening', listening);
    server.listen({ port, ...(isLoopback(address) && { host: address }) });
  });
}
