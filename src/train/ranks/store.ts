/**
 * Rendezvous of the ranks of a run: a small key-value store on rank 0, reached over authenticated TCP connections
 * (channel.ts). It names ranks that do not connect and ranks that exit without a message.
 *
 * Launchers use MASTER_PORT themselves (torchrun's agent listens there), so the store takes the first free port after it,
 * and the other ranks try those ports until the server at one of them proves the key of the run. The port is closed as
 * soon as all ranks have joined.
 */
import { hostname } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';
import { TrefoilError } from '../../errors.js';
import { Channel, connectTo } from './channel.js';
import {
  type ClientLine,
  durationText,
  type Member,
  type Reply,
  type Request,
  rankList,
  type ServerLine,
  StoreServer,
} from './store-server.js';

export type { Member } from './store-server.js';

export const STORE_PORTS = 16;
const CONNECT_MS = 3000;
const RETRY_MS = 200;
const NO_ANSWER = 'no answer';
/** Rank 0 reports its time-out to the others; they wait this much longer for the report. */
const GRACE_MS = 5000;

export interface StoreOptions {
  readonly rank: number;
  readonly world: number;
  /** HMAC key of this start of the run (`runKey` in secret.ts). */
  readonly key: string;
  /** The machine of rank 0: MASTER_ADDR. */
  readonly address: string;
  /** MASTER_PORT; the store listens on one of the ports after it. */
  readonly port: number;
  /** How long to wait for other ranks, here and in `get` and `gather`. */
  readonly timeoutMs: number;
  /** Name of this machine; defaults to its host name. */
  readonly host?: string;
}

/** The ports after MASTER_PORT that ranks may use. */
export function storePorts(port: number): number[] {
  return Array.from({ length: STORE_PORTS }, (_, i) => port + 1 + i).filter((one) => one < 65536);
}

/** Resolves when all ranks have joined. */
export async function openStore(options: StoreOptions): Promise<RankStore> {
  const self: Member = { rank: options.rank, host: options.host ?? hostname(), pid: process.pid };
  const ports = storePorts(options.port);
  if (options.rank !== 0) return RemoteStore.open(options, self, ports);
  const { world, key, address } = options;
  const server = await StoreServer.listen({ world, key, self, address, ports });
  await server.complete(options.timeoutMs);
  return new LocalStore(options, server);
}

/** The store as a rank sees it. Common to both ends: values as bytes, and error messages. */
export abstract class RankStore {
  readonly #options: StoreOptions;
  readonly #lost: Member[] = [];
  readonly #listeners: ((member: Member) => void)[] = [];
  #requests = 0;

  constructor(options: StoreOptions) {
    this.#options = options;
  }

  /** All ranks, in order of rank. */
  abstract readonly members: readonly Member[];
  /** The port of the store. */
  abstract readonly port: number;
  abstract close(): void;
  protected abstract ask(request: Request): Promise<Reply>;

  /** Waits until rank 0 has handed it out. */
  async get(key: string): Promise<Uint8Array> {
    const reply = await this.ask({ ...this.#request(key), op: 'get' });
    if ('value' in reply) return toBytes(reply.value);
    const { rank, timeoutMs } = this.#options;
    throw new TrefoilError(
      `rendezvous: rank ${rank} waited ${durationText(timeoutMs)} for "${key}", which no rank has set`,
    );
  }

  /**
   * Broadcasts rank 0's value. On rank 0 it resolves when every rank has confirmed the value: from then on no rank waits for
   * an answer of the server, and rank 0 may block its thread.
   */
  abstract handOut(key: string, value: Uint8Array): Promise<Uint8Array>;

  /** The values that the ranks gave under this name, by rank, once all have. */
  async gather(name: string, value: Uint8Array): Promise<Uint8Array[]> {
    const reply = await this.ask({ ...this.#request(name), op: 'gather', value: toText(value) });
    if ('values' in reply) return reply.values.map(toBytes);
    throw this.late(name, 'missing' in reply ? reply.missing : []);
  }

  /** Calls `listener` with every rank that is lost, including those lost before. */
  onLost(listener: (member: Member) => void): void {
    this.#listeners.push(listener);
    for (const member of this.#lost) listener(member);
  }

  protected late(name: string, missing: readonly number[]): TrefoilError {
    const { rank, timeoutMs } = this.#options;
    const hosts = this.members.filter((member) => missing.includes(member.rank)).map(({ host }) => host);
    return new TrefoilError(
      `rank ${rank} waited ${durationText(timeoutMs)} at "${name}" for ${rankList(missing)} ` +
        `(${[...new Set(hosts)].join(', ')}); check their output`,
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

class LocalStore extends RankStore {
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
  /** Also keeps the process alive until the answer arrives. */
  readonly timer: NodeJS.Timeout;
}

class RemoteStore extends RankStore {
  members: readonly Member[] = [];
  readonly port: number;
  readonly #channel: Channel;
  readonly #waiting = new Map<number, Waiting>();
  #isClosed = false;
  #failure: Error | null = null;

  private constructor(options: StoreOptions, channel: Channel, port: number) {
    super(options);
    this.#channel = channel;
    this.port = port;
  }

  static async open(options: StoreOptions, self: Member, ports: readonly number[]): Promise<RemoteStore> {
    const { address, timeoutMs, world, key } = options;
    const deadline = Date.now() + timeoutMs;
    let last = NO_ANSWER;
    while (Date.now() < deadline) {
      for (const port of ports) {
        const hello = { ...self, world };
        const found = await connectTo({ host: address, port, service: 'store', key, hello, timeoutMs: CONNECT_MS });
        if (found instanceof Channel) {
          const store = new RemoteStore(options, found, port);
          await store.#join(Math.max(0, deadline - Date.now()) + GRACE_MS, world);
          return store;
        }
        if ('refusal' in found) throw new TrefoilError(found.refusal);
        if (!found.failure.includes('ECONNREFUSED') || last === NO_ANSWER) last = found.failure;
        if (Date.now() >= deadline) break;
      }
      await sleep(RETRY_MS);
    }
    throw new TrefoilError(
      `rendezvous: rank ${self.rank} did not find rank 0 at ${address}, ports ${ports[0]} to ${ports.at(-1)}, within ` +
        `${durationText(timeoutMs)} (NSA_PG_TIMEOUT_MIN): ${last}; check that rank 0 runs, that MASTER_ADDR, MASTER_PORT ` +
        'and TREFOIL_RUN_SECRET are the same on all ranks, and that no firewall blocks these ports',
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
    this.#channel.socket.end();
  }

  #send(line: ClientLine): void {
    this.#channel.send(line);
  }

  /** Waits until rank 0 reports that all ranks have joined. */
  async #join(timeoutMs: number, world: number): Promise<void> {
    const channel = this.#channel;
    await new Promise<void>((resolve, reject) => {
      const fail = (message: string) => {
        clearTimeout(timer);
        channel.pause();
        channel.socket.destroy();
        reject(new TrefoilError(message));
      };
      const timer = setTimeout(
        () =>
          fail(
            `rendezvous: rank 0 did not report within ${durationText(timeoutMs)} that all ${world} ranks have joined`,
          ),
        timeoutMs,
      );
      channel.listen(
        (line) => {
          if ('failed' in line) fail(`${line['failed']}`);
          if (!('complete' in line)) return;
          clearTimeout(timer);
          this.members = line['complete'] as readonly Member[];
          channel.listen(
            (later) => this.#take(later as unknown as ServerLine),
            () => this.#lostServer(),
          );
          resolve();
        },
        () => fail('rendezvous: rank 0 exited before all ranks had joined; check its output'),
      );
    });
    channel.socket.unref(); // a process that has nothing else to do may exit
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
    this.#failure = new TrefoilError(`rank 0 on ${host} exited; check its output`);
    for (const { reject, timer } of this.#waiting.values()) {
      clearTimeout(timer);
      reject(this.#failure);
    }
    this.#waiting.clear();
    if (!this.#isClosed) this.lose(this.members[0]);
  }
}

function toText(bytes: Uint8Array): string {
  return Buffer.from(bytes).toString('base64');
}

function toBytes(text: string): Uint8Array {
  return new Uint8Array(Buffer.from(text, 'base64'));
}
