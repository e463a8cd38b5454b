/** Rank 0's end of the store: the members of the run, and the values they exchange. */
import type { Socket } from 'node:net';
import { TrefoilError } from '../../errors.js';
import * as z from '../../zod.js';
import { type Line, type Listener, listen, type Peer, sendLine } from './channel.js';

/** One rank of a world. */
export interface Member {
  readonly rank: number;
  readonly host: string;
  readonly pid: number;
}

export type Request = { readonly id: number; readonly key: string; readonly seconds: number } & (
  | { readonly op: 'get' }
  | { readonly op: 'gather'; readonly value: string }
);

export type Reply =
  | { readonly value: string }
  | { readonly values: readonly string[] }
  /** The time limit has passed; of a gather, before these ranks had called it. */
  | { readonly missing: readonly number[] };

/** Sent by the server without a request. */
type Notice =
  | { readonly complete: readonly Member[] }
  | { readonly failed: string }
  | { readonly lost: Member }
  | { readonly bye: true };

export type ServerLine = Notice | ({ readonly id: number } & Reply);
export type ClientLine = Request | { readonly got: string } | { readonly bye: true };

const helloLine = z.object({ rank: z.int(), world: z.int(), host: z.string().max(255), pid: z.int() });
const common = { id: z.int(), key: z.string().max(255), seconds: z.number().positive() };
const requestLine = z.discriminatedUnion('op', [
  z.object({ ...common, op: z.literal('get') }),
  z.object({ ...common, op: z.literal('gather'), value: z.string() }),
]);

export interface ServerOptions {
  readonly world: number;
  /** HMAC key of the run. */
  readonly key: string;
  readonly self: Member;
  /** The address at which the other ranks connect. */
  readonly address: string;
  /** Tried in this order. */
  readonly ports: readonly number[];
}

interface Gathering {
  readonly values: Map<number, string>;
  readonly waiting: Set<() => void>;
}

export class StoreServer {
  readonly #options: ServerOptions;
  readonly #members = new Map<number, { readonly member: Member; readonly socket: Socket | null }>();
  readonly #values = new Map<string, string>();
  readonly #waiting = new Map<string, Set<() => void>>();
  readonly #gatherings = new Map<string, Gathering>();
  /** Per key of `handOut`: the ranks that have confirmed the value, and the check to run after each of them. */
  readonly #handedOut = new Map<string, { readonly got: Set<number>; check: () => void }>();
  #listener: Listener | null = null;
  #onComplete: () => void = () => {};
  #isComplete = false;
  #isClosed = false;
  /** Called with each rank whose connection ended unexpectedly. */
  onLost: (member: Member) => void = () => {};

  private constructor(options: ServerOptions) {
    this.#options = options;
    this.#members.set(options.self.rank, { member: options.self, socket: null });
  }

  static async listen(options: ServerOptions): Promise<StoreServer> {
    const store = new StoreServer(options);
    const { world, key, address, ports } = options;
    const admit = (hello: Line, socket: Socket) => store.#admit(hello, socket);
    store.#listener = await listen({ service: 'store', key, ports, address, expected: world, admit });
    if (store.#listener) return store;
    throw new TrefoilError(
      `rendezvous: none of the ports ${ports[0]} to ${ports.at(-1)} is free on the machine of rank 0; ` +
        'set MASTER_PORT to another number on every rank',
    );
  }

  get port(): number {
    return this.#listener!.port;
  }

  get members(): Member[] {
    return [...this.#members.values()].map(({ member }) => member).sort((a, b) => a.rank - b.rank);
  }

  /** Waits until every rank has joined, then stops listening. On time-out every member gets the list of missing ranks. */
  async complete(timeoutMs: number): Promise<void> {
    const isInTime = await waitFor(timeoutMs, (done) => {
      this.#onComplete = done;
      if (this.#members.size === this.#options.world) done();
    });
    if (!isInTime) {
      const missing = Array.from({ length: this.#options.world }, (_, rank) => rank).filter(
        (rank) => !this.#members.has(rank),
      );
      const failed =
        `rendezvous: ${rankList(missing)} of ${this.#options.world} did not connect to port ${this.port} of ` +
        `${this.#options.self.host} within ${durationText(timeoutMs)} (NSA_PG_TIMEOUT_MIN); check their output`;
      this.#broadcast({ failed });
      this.close();
      throw new TrefoilError(failed);
    }
    this.#isComplete = true;
    this.#broadcast({ complete: this.members });
    // A closed port costs the training thread nothing, whatever is sent to it.
    this.#listener!.close();
    // The store must not keep a process alive that has nothing else to do.
    for (const { socket } of this.#members.values()) socket?.unref();
  }

  /** Executes a request of rank `rank`. */
  async handle(rank: number, request: Request): Promise<Reply> {
    switch (request.op) {
      case 'get':
        return this.#get(request.key, request.seconds * 1000);
      case 'gather':
        return this.#gather(rank, request.key, request.value, request.seconds * 1000);
    }
  }

  /** Sends a value to every rank. Resolves when all have confirmed it, or on time-out, with the ranks that have not. */
  async handOut(key: string, value: string, timeoutMs: number): Promise<number[]> {
    const others = Array.from({ length: this.#options.world - 1 }, (_, i) => i + 1);
    const got = new Set<number>();
    await waitFor(timeoutMs, (done) => {
      const check = () => got.size === others.length && done();
      this.#handedOut.set(key, { got, check });
      check();
      this.#put(key, value);
    });
    this.#handedOut.delete(key);
    return others.filter((rank) => !got.has(rank));
  }

  close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    this.#broadcast({ bye: true });
    this.#listener?.close();
    for (const { socket } of this.#members.values()) socket?.end();
  }

  #put(key: string, value: string): void {
    this.#values.set(key, value);
    for (const wake of this.#waiting.get(key) ?? []) wake();
    this.#waiting.delete(key);
  }

  async #get(key: string, timeoutMs: number): Promise<Reply> {
    if (!this.#values.has(key)) {
      const waiting = this.#waiting.get(key) ?? new Set();
      this.#waiting.set(key, waiting);
      await waitFor(timeoutMs, (done) => void waiting.add(done));
    }
    const value = this.#values.get(key);
    return value === undefined ? { missing: [] } : { value };
  }

  async #gather(rank: number, key: string, value: string, timeoutMs: number): Promise<Reply> {
    const gathering = this.#gatherings.get(key) ?? { values: new Map<number, string>(), waiting: new Set() };
    this.#gatherings.set(key, gathering);
    gathering.values.set(rank, value);
    const { world } = this.#options;
    if (gathering.values.size === world) {
      this.#gatherings.delete(key); // the next one may have the same name
      for (const wake of gathering.waiting) wake();
    } else {
      await waitFor(timeoutMs, (done) => void gathering.waiting.add(done));
    }
    const all = Array.from({ length: world }, (_, other) => gathering.values.get(other));
    const missing = all.flatMap((found, other) => (found === undefined ? [other] : []));
    return missing.length > 0 ? { missing } : { values: all as string[] };
  }

  #admit(line: Line, socket: Socket): Peer | string {
    const { world } = this.#options;
    const hello = helloLine.safeParse(line);
    if (!hello.success) return 'rendezvous: malformed hello';
    const { rank, host, pid, world: theirs } = hello.data;
    if (theirs !== world)
      return `rendezvous: rank ${rank} was started with world size ${theirs}, rank 0 with world size ${world}`;
    if (rank < 1 || rank >= world) return `rendezvous: rank ${rank} is not below the world size ${world}`;
    const held = this.#members.get(rank)?.member;
    if (held) return `rendezvous: rank ${rank} has already joined: process ${held.pid} on ${held.host}`;
    const member: Member = { rank, host, pid };
    this.#members.set(rank, { member, socket });
    if (this.#members.size === world) this.#onComplete();
    return {
      onLine: (sent) => this.#take(member, socket, sent),
      onClose: () => this.#members.get(rank)?.socket === socket && this.#left(member),
    };
  }

  #take(member: Member, socket: Socket, line: Line): void {
    if (line['bye'] === true) {
      this.#members.delete(member.rank);
      return;
    }
    if (typeof line['got'] === 'string') {
      const handing = this.#handedOut.get(line['got']);
      handing?.got.add(member.rank);
      handing?.check();
      return;
    }
    const request = requestLine.safeParse(line);
    if (!request.success) {
      socket.destroy();
      return;
    }
    void this.handle(member.rank, request.data).then((reply) => sendLine(socket, { id: request.data.id, ...reply }));
  }

  /** Before all ranks have joined, a rank whose connection ends may connect again; afterwards it is lost. */
  #left(member: Member): void {
    this.#members.delete(member.rank);
    if (!this.#isComplete || this.#isClosed) return;
    this.#broadcast({ lost: member });
    this.onLost(member);
  }

  #broadcast(notice: Notice): void {
    for (const { socket } of this.#members.values()) if (socket) sendLine(socket, notice);
  }
}

/** Whether `begin` called its argument within the time limit. */
function waitFor(timeoutMs: number, begin: (done: () => void) => void): Promise<boolean> {
  return new Promise((resolve) => {
    const timer = setTimeout(() => resolve(false), timeoutMs);
    begin(() => {
      clearTimeout(timer);
      resolve(true);
    });
  });
}

/** "rank 3", "ranks 1 and 2", "ranks 0, 1 and 2", "ranks 0, 1, 2 and 61 more". */
export function rankList(ranks: readonly number[]): string {
  if (ranks.length === 1) return `rank ${ranks[0]}`;
  const shown = ranks.length > 8 ? ranks.slice(0, 7) : ranks.slice(0, -1);
  const last = ranks.length > 8 ? `${ranks.length - 7} more` : `${ranks.at(-1)}`;
  return `ranks ${shown.join(', ')} and ${last}`;
}

export function durationText(ms: number): string {
  return ms >= 60_000 ? `${+(ms / 60_000).toFixed(1)} min` : `${+(ms / 1000).toFixed(1)} s`;
}
