/**
 * Where the ranks of a run meet: a small store of values on rank 0, reached over TCP. Ranks prove to each other that they
 * know the run id; a rank that does not come, or goes without a word, is named.
 *
 * Launchers keep MASTER_PORT for themselves (torchrun's agent listens there), so the store takes the first free port behind
 * it, and ranks try those ports until one of them proves to be theirs.
 */
import { randomBytes } from 'node:crypto';
import { connect, type Socket } from 'node:net';
import { hostname } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';
import { TrefoilError } from '../errors.js';
import { StoreServer } from './store-server.js';
import {
  type ClientLine,
  durationText,
  type Greeting,
  type Hello,
  isLoopback,
  isProof,
  type Member,
  PROTOCOL,
  proof,
  type Reply,
  type Request,
  rankList,
  readLines,
  type ServerLine,
  sendLine,
  type Welcome,
} from './store-wire.js';

export type { Member } from './store-wire.js';

export const STORE_PORTS = 16;
const CONNECT_MS = 3000;
const RETRY_MS = 200;
const LONGEST_LINE = 2 ** 20;
/** Rank 0 says in time who is missing; a rank waits a little longer for its word. */
const GRACE_MS = 5000;

export interface StoreOptions {
  readonly rank: number;
  readonly world: number;
  /** What only the ranks of this run, and of this start of it, know. */
  readonly runId: string;
  /** The machine of rank 0: MASTER_ADDR. */
  readonly address: string;
  /** MASTER_PORT; the store listens on one of the ports behind it. */
  readonly port: number;
  /** How long to wait for others, here and in `get` and `gather`. */
  readonly timeoutMs: number;
  /** What this machine calls itself. */
  readonly host?: string;
}

export interface RankStore {
  /** Everybody, by rank. */
  readonly members: readonly Member[];
  /** The port on which the ranks met. */
  readonly port: number;
  set(key: string, value: Uint8Array): Promise<void>;
  /** Waits until somebody has set it. */
  get(key: string): Promise<Uint8Array>;
  /**
   * Rank 0's value, for all. Rank 0 goes on when everybody holds it: from then on nobody needs an answer of it, and it may
   * call what blocks its thread.
   */
  handOut(key: string, value: Uint8Array): Promise<Uint8Array>;
  /** What every rank gave under this name, by rank, once all have. */
  gather(name: string, value: Uint8Array): Promise<Uint8Array[]>;
  /** Hears of every rank that goes without a word; of those that went before, at once. */
  onLost(listener: (member: Member) => void): void;
  close(): void;
}

/** The ports behind MASTER_PORT that ranks may use. */
export function storePorts(port: number): number[] {
  return Array.from({ length: STORE_PORTS }, (_, i) => port + 1 + i).filter((one) => one < 65536);
}

/** Resolves when all ranks have met. */
export async function openStore(options: StoreOptions): Promise<RankStore> {
  const self: Member = { rank: options.rank, host: options.host ?? hostname(), pid: process.pid };
  const ports = storePorts(options.port);
  if (options.rank !== 0) return RemoteStore.open(options, self, ports);
  const bind = isLoopback(options.address) ? options.address : undefined;
  const server = await StoreServer.listen({ world: options.world, runId: options.runId, self, bind, ports });
  await server.complete(options.timeoutMs);
  return new LocalStore(options, server);
}

/** What both ends have in common: values as bytes, and errors in words. */
abstract class Store implements RankStore {
  readonly #options: StoreOptions;
  readonly #lost: Member[] = [];
  readonly #listeners: ((member: Member) => void)[] = [];
  #requests = 0;

  constructor(options: StoreOptions) {
    this.#options = options;
  }

  abstract readonly members: readonly Member[];
  abstract readonly port: number;
  abstract close(): void;
  protected abstract ask(request: Request): Promise<Reply>;

  async set(key: string, value: Uint8Array): Promise<void> {
    await this.ask({ ...this.#request(key), op: 'set', value: toText(value) });
  }

  async get(key: string): Promise<Uint8Array> {
    const reply = await this.ask({ ...this.#request(key), op: 'get' });
    if ('value' in reply) return toBytes(reply.value);
    const { rank, timeoutMs } = this.#options;
    throw new TrefoilError(
      `rendezvous: rank ${rank} waited ${durationText(timeoutMs)} for "${key}", which no rank has given`,
    );
  }

  abstract handOut(key: string, value: Uint8Array): Promise<Uint8Array>;

  async gather(name: string, value: Uint8Array): Promise<Uint8Array[]> {
    const reply = await this.ask({ ...this.#request(name), op: 'gather', value: toText(value) });
    if ('values' in reply) return reply.values.map(toBytes);
    throw this.late(name, 'missing' in reply ? reply.missing : []);
  }

  onLost(listener: (member: Member) => void): void {
    this.#listeners.push(listener);
    for (const member of this.#lost) listener(member);
  }

  protected late(name: string, missing: readonly number[]): TrefoilError {
    const { rank, timeoutMs } = this.#options;
    const hosts = this.members.filter((member) => missing.includes(member.rank)).map(({ host }) => host);
    return new TrefoilError(
      `rank ${rank} waited ${durationText(timeoutMs)} at "${name}" for ${rankList(missing)} ` +
        `(${[...new Set(hosts)].join(', ')}); look at what they printed`,
    );
  }

  protected lose(member: Member): void {
    this.#lost.push(member);
    for (const listener of this.#listeners) listener(member);
  }

  #request(key: string): { id: number; key: string; seconds: number } {
    this.#requests += 1;
    return { id: this.#requests, key, seconds: this.#options.timeoutMs / 1000 };
  }
}

class LocalStore extends Store {
  readonly members: readonly Member[];
  readonly port: number;
  readonly #server: StoreServer;
  readonly #timeoutMs: number;

  constructor(options: StoreOptions, server: StoreServer) {
    super(options);
    this.#server = server;
    this.#timeoutMs = options.timeoutMs;
    this.members = server.members;
    this.port = server.port;
    server.onLost = (member) => this.lose(member);
  }

  async handOut(key: string, value: Uint8Array): Promise<Uint8Array> {
    const missing = await this.#server.handOut(key, toText(value), this.#timeoutMs);
    if (missing.length > 0) throw this.late(key, missing);
    return value;
  }

  protected ask(request: Request): Promise<Reply> {
    return this.#server.handle(0, request);
  }

  close(): void {
    this.#server.close();
  }
}

interface Waiting {
  readonly resolve: (reply: Reply) => void;
  readonly reject: (error: Error) => void;
  /** Also what keeps the process alive until the answer comes. */
  readonly timer: NodeJS.Timeout;
}

class RemoteStore extends Store {
  members: readonly Member[] = [];
  readonly port: number;
  readonly #socket: Socket;
  readonly #waiting = new Map<number, Waiting>();
  #isClosed = false;
  #failure: Error | null = null;

  private constructor(options: StoreOptions, socket: Socket, port: number) {
    super(options);
    this.#socket = socket;
    this.port = port;
  }

  static async open(options: StoreOptions, self: Member, ports: readonly number[]): Promise<RemoteStore> {
    const { address, timeoutMs, world } = options;
    const deadline = Date.now() + timeoutMs;
    let last = 'nobody answered';
    while (Date.now() < deadline) {
      for (const port of ports) {
        const found = await knock(options, self, port);
        if (typeof found !== 'string') {
          const store = new RemoteStore(options, found.socket, port);
          await store.#meet(found, Math.max(0, deadline - Date.now()) + GRACE_MS, world);
          return store;
        }
        if (!found.includes('ECONNREFUSED') || last === 'nobody answered') last = found;
        if (Date.now() >= deadline) break;
      }
      await sleep(RETRY_MS);
    }
    throw new TrefoilError(
      `rendezvous: rank ${self.rank} did not find rank 0 at ${address}, ports ${ports[0]} to ${ports.at(-1)}, within ` +
        `${durationText(timeoutMs)} (NSA_PG_TIMEOUT_MIN): ${last}; is rank 0 running, do MASTER_ADDR and MASTER_PORT ` +
        'agree on all ranks, and can these ports be reached?',
    );
  }

  protected ask(request: Request): Promise<Reply> {
    return new Promise((resolve, reject) => {
      if (this.#failure) {
        reject(this.#failure);
        return;
      }
      const timeoutMs = request.seconds * 1000 + GRACE_MS;
      const timer = setTimeout(() => {
        this.#waiting.delete(request.id);
        reject(new TrefoilError(`rank 0 on ${this.members[0].host} did not answer within ${durationText(timeoutMs)}`));
      }, timeoutMs);
      this.#waiting.set(request.id, { resolve, reject, timer });
      this.#send(request);
    });
  }

  async handOut(key: string): Promise<Uint8Array> {
    const value = await this.get(key);
    this.#send({ got: key });
    return value;
  }

  close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    this.#send({ bye: true });
    this.#socket.end();
  }

  #send(line: ClientLine): void {
    sendLine(this.#socket, line);
  }

  /** Waits for the word that all have come. */
  async #meet(connection: Connection, timeoutMs: number, world: number): Promise<void> {
    await new Promise<void>((resolve, reject) => {
      const fail = (message: string) => {
        clearTimeout(timer);
        connection.listen(
          () => {},
          () => {},
        );
        connection.socket.destroy();
        reject(new TrefoilError(message));
      };
      const timer = setTimeout(
        () =>
          fail(`rendezvous: rank 0 did not say within ${durationText(timeoutMs)} that all ${world} ranks are there`),
        timeoutMs,
      );
      connection.listen(
        (line) => {
          if ('failed' in line) fail(`${line['failed']}`);
          if (!('complete' in line)) return;
          clearTimeout(timer);
          this.members = line['complete'] as readonly Member[];
          connection.listen(
            (later) => this.#take(later as unknown as ServerLine),
            () => this.#lostServer(),
          );
          resolve();
        },
        () => fail('rendezvous: rank 0 went away before all ranks had come; look at what it printed'),
      );
    });
    this.#socket.unref(); // a process that has nothing else to do may end
  }

  #take(line: ServerLine): void {
    if ('lost' in line) this.lose(line.lost);
    else if ('bye' in line) this.#isClosed = true;
    else if ('id' in line) {
      const waiting = this.#waiting.get(line.id);
      if (!waiting) return;
      this.#waiting.delete(line.id);
      clearTimeout(waiting.timer);
      waiting.resolve(line);
    }
  }

  #lostServer(): void {
    const host = this.members[0]?.host ?? 'its machine';
    this.#failure = new TrefoilError(`rank 0 on ${host} went away; look at what it printed`);
    for (const { reject, timer } of this.#waiting.values()) {
      clearTimeout(timer);
      reject(this.#failure);
    }
    this.#waiting.clear();
    if (!this.#isClosed) this.lose(this.members[0]);
  }
}

type Line = Record<string, unknown>;

/** A connection that keeps what comes while nobody listens. */
class Connection {
  readonly socket: Socket;
  #backlog: Line[] = [];
  #isEnded = false;
  #take: ((line: Line) => void) | null = null;
  #onClose: () => void = () => {};

  constructor(socket: Socket) {
    this.socket = socket;
    socket.setNoDelay(true);
    socket.setKeepAlive(true, 10_000);
    socket.on('close', () => {
      this.#isEnded = true;
      if (this.#take) this.#onClose();
    });
    readLines(
      socket,
      () => LONGEST_LINE,
      (line) => (this.#take ? this.#take(line) : this.#backlog.push(line)),
    );
  }

  /** From now on lines and the end go here; nowhere without arguments. */
  listen(take: ((line: Line) => void) | null = null, onClose: () => void = () => {}): void {
    this.#take = take;
    this.#onClose = onClose;
    while (this.#take && this.#backlog.length > 0) this.#take(this.#backlog.shift()!);
    if (this.#take && this.#isEnded) this.#onClose();
  }
}

/** Tries one port: a connection, or why this is not rank 0. Throws when it is and wants nothing of this rank. */
async function knock(options: StoreOptions, self: Member, port: number): Promise<Connection | string> {
  const { address, runId, world } = options;
  return new Promise((resolve, reject) => {
    const socket = connect({ host: address, port });
    const connection = new Connection(socket);
    const nonce = randomBytes(16).toString('hex');
    const leave = (tell: () => void) => {
      clearTimeout(timer);
      connection.listen();
      tell();
    };
    const giveUp = (reason: string) =>
      leave(() => {
        socket.destroy();
        resolve(reason);
      });
    const timer = setTimeout(() => giveUp(`port ${port} does not answer`), CONNECT_MS);
    socket.on('error', (error) => giveUp(error.message)); // one that comes later is followed by 'close', which is heard
    const hungUp = () => giveUp(`port ${port} hung up`);
    const answered = (line: Line, theirs: string) => {
      const welcome = line as Welcome;
      if ('refused' in welcome)
        return leave(() => {
          socket.destroy();
          reject(new TrefoilError(`${welcome.refused}`));
        });
      const isOurs = 'proof' in welcome && isProof(proof(runId, 'server', theirs, nonce, self.rank), welcome.proof);
      if (!isOurs) return giveUp(`port ${port} belongs to another run (or the run ids differ)`);
      leave(() => resolve(connection));
    };
    const greeted = (line: Line) => {
      const { trefoil, nonce: theirs } = line as Partial<Greeting>;
      if (typeof theirs !== 'string') return giveUp(`port ${port} belongs to another program`);
      if (trefoil !== PROTOCOL) return giveUp(`port ${port} belongs to another version of trefoil`);
      const hello: Hello = { ...self, world, nonce, proof: proof(runId, 'client', theirs, nonce, self.rank) };
      connection.listen((answer) => answered(answer, theirs), hungUp);
      sendLine(socket, hello);
    };
    connection.listen(greeted, hungUp);
  });
}

function toText(bytes: Uint8Array): string {
  return Buffer.from(bytes).toString('base64');
}

function toBytes(text: string): Uint8Array {
  return new Uint8Array(Buffer.from(text, 'base64'));
}
