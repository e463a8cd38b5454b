/** Rank 0's end of the store: who is there, and the values they leave for each other. */
import { randomBytes } from 'node:crypto';
import { createServer, type Server, type Socket } from 'node:net';
import { z } from 'zod';
import { TrefoilError } from '../errors.js';
import {
  durationText,
  type Greeting,
  isProof,
  type Member,
  type Notice,
  PROTOCOL,
  proof,
  type Reply,
  type Request,
  rankList,
  readLines,
  sendLine,
  type Welcome,
} from './store-wire.js';

/** A stranger gets this long, this much and this many places. */
const HELLO_MS = 10_000;
const HELLO_LENGTH = 4096;
const SPARE_CONNECTIONS = 64;
/** Values are small: addresses and ids. */
const LONGEST_LINE = 2 ** 20;

const helloLine = z.object({
  ...{ rank: z.int(), world: z.int(), host: z.string().max(255), pid: z.int() },
  ...{ nonce: z.string().max(128), proof: z.string().max(128) },
});
const common = { id: z.int(), key: z.string().max(255), seconds: z.number().positive() };
const requestLine = z.discriminatedUnion('op', [
  z.object({ ...common, op: z.literal('set'), value: z.string() }),
  z.object({ ...common, op: z.literal('get') }),
  z.object({ ...common, op: z.literal('gather'), value: z.string() }),
]);

export interface ServerOptions {
  readonly world: number;
  readonly runId: string;
  readonly self: Member;
  /** Where to listen: an address, or undefined for all of this machine's. */
  readonly bind: string | undefined;
  /** Tried in this order. */
  readonly ports: readonly number[];
}

interface Gathering {
  readonly values: Map<number, string>;
  readonly waiting: Set<() => void>;
}

export class StoreServer {
  readonly #options: ServerOptions;
  readonly #server: Server;
  readonly #members = new Map<number, { readonly member: Member; readonly socket: Socket | null }>();
  readonly #values = new Map<string, string>();
  readonly #waiting = new Map<string, Set<() => void>>();
  readonly #gatherings = new Map<string, Gathering>();
  /** Who has got a value that was handed out, and who waits until all have. */
  readonly #handedOut = new Map<string, { readonly got: Set<number>; check: () => void }>();
  readonly #sockets = new Set<Socket>();
  #onComplete: () => void = () => {};
  #isComplete = false;
  #isClosed = false;
  port = 0;
  /** Told of a rank whose connection ended without a word. */
  onLost: (member: Member) => void = () => {};

  private constructor(options: ServerOptions) {
    this.#options = options;
    this.#members.set(options.self.rank, { member: options.self, socket: null });
    this.#server = createServer((socket) => this.#greet(socket));
    this.#server.maxConnections = options.world + SPARE_CONNECTIONS;
  }

  static async listen(options: ServerOptions): Promise<StoreServer> {
    const store = new StoreServer(options);
    for (const port of options.ports)
      if (await store.#tryPort(port)) {
        store.port = port;
        return store;
      }
    const { ports } = options;
    throw new TrefoilError(
      `rendezvous: none of the ports ${ports[0]} to ${ports.at(-1)} is free on the machine of rank 0; ` +
        'set MASTER_PORT to another number on every rank',
    );
  }

  get members(): Member[] {
    return [...this.#members.values()].map(({ member }) => member).sort((a, b) => a.rank - b.rank);
  }

  /** Waits until every rank has come; ranks that have not are named, to everybody who has. */
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
        `rendezvous: ${rankList(missing)} of ${this.#options.world} did not come to port ${this.port} of ` +
        `${this.#options.self.host} within ${durationText(timeoutMs)} (NSA_PG_TIMEOUT_MIN); look at what they printed`;
      this.#tell({ failed });
      this.close();
      throw new TrefoilError(failed);
    }
    this.#isComplete = true;
    this.#tell({ complete: this.members });
    // From here on the store must not keep a process alive that has nothing else to do.
    this.#server.unref();
    for (const socket of this.#sockets) socket.unref();
  }

  /** Does what rank `rank` asks for. */
  async handle(rank: number, request: Request): Promise<Reply> {
    switch (request.op) {
      case 'set':
        this.#put(request.key, request.value);
        return { value: '' };
      case 'get':
        return this.#get(request.key, request.seconds * 1000);
      case 'gather':
        return this.#gather(rank, request.key, request.value, request.seconds * 1000);
    }
  }

  /** Gives every rank a value; resolves when all of them hold it. Ranks that do not take it are returned. */
  async handOut(key: string, value: string, timeoutMs: number): Promise<number[]> {
    const everyone = Array.from({ length: this.#options.world - 1 }, (_, i) => i + 1);
    const got = new Set<number>();
    await waitFor(timeoutMs, (done) => {
      const check = () => got.size === everyone.length && done();
      this.#handedOut.set(key, { got, check });
      check();
      this.#put(key, value);
    });
    this.#handedOut.delete(key);
    return everyone.filter((rank) => !got.has(rank));
  }

  close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    this.#tell({ bye: true });
    this.#server.close();
    for (const socket of this.#sockets) socket.end();
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

  async #tryPort(port: number): Promise<boolean> {
    const { bind } = this.#options;
    const server = this.#server;
    return new Promise((resolve, reject) => {
      const failed = (error: NodeJS.ErrnoException) => {
        server.off('listening', listening);
        if (error.code === 'EADDRINUSE' || error.code === 'EACCES') resolve(false);
        else reject(new TrefoilError(`rendezvous: rank 0 cannot listen on port ${port}: ${error.message}`));
      };
      const listening = () => {
        server.off('error', failed);
        resolve(true);
      };
      server.once('error', failed);
      server.once('listening', listening);
      server.listen({ port, ...(bind !== undefined && { host: bind }) });
    });
  }

  #greet(socket: Socket): void {
    const greeting: Greeting = { trefoil: PROTOCOL, nonce: randomBytes(16).toString('hex') };
    let member: Member | null = null;
    this.#sockets.add(socket);
    socket.setNoDelay(true);
    socket.setKeepAlive(true, 10_000);
    const timer = setTimeout(() => socket.destroy(), HELLO_MS);
    socket.on('error', () => {}); // 'close' follows and says all there is to say
    socket.on('close', () => {
      clearTimeout(timer);
      this.#sockets.delete(socket);
      if (member && this.#members.get(member.rank)?.socket === socket) this.#left(member);
    });
    readLines(
      socket,
      () => (member ? LONGEST_LINE : HELLO_LENGTH),
      (line) => {
        if (member) {
          this.#take(member, socket, line);
          return;
        }
        clearTimeout(timer);
        const welcome = this.#welcome(greeting.nonce, line);
        sendLine(socket, welcome.line);
        if (!welcome.member) {
          socket.end();
          return;
        }
        member = welcome.member;
        this.#members.set(member.rank, { member, socket });
        if (this.#members.size === this.#options.world) this.#onComplete();
      },
    );
    sendLine(socket, greeting);
  }

  #welcome(nonce: string, line: Record<string, unknown>): { line: Welcome; member?: Member } {
    const { runId, world } = this.#options;
    const hello = helloLine.safeParse(line);
    const isOurs =
      hello.success && isProof(proof(runId, 'client', nonce, hello.data.nonce, hello.data.rank), hello.data.proof);
    if (!isOurs) return { line: { stranger: true } };
    const { rank, host, pid, world: theirs, nonce: own } = hello.data;
    const refuse = (refused: string) => ({ line: { refused: `rendezvous: ${refused}` } });
    if (theirs !== world) return refuse(`rank ${rank} was started as one of ${theirs}, rank 0 as one of ${world}`);
    if (rank < 1 || rank >= world) return refuse(`there is no rank ${rank} among ${world}`);
    const held = this.#members.get(rank)?.member;
    if (held) return refuse(`rank ${rank} is here already: process ${held.pid} on ${held.host}`);
    if (this.#isComplete || this.#isClosed) return refuse(`rank ${rank} came after the ranks had met`);
    return { line: { proof: proof(runId, 'server', nonce, own, rank) }, member: { rank, host, pid } };
  }

  #take(member: Member, socket: Socket, line: Record<string, unknown>): void {
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

  /** Before all have met, a rank that goes makes room for its next try; afterwards it is lost to all. */
  #left(member: Member): void {
    this.#members.delete(member.rank);
    if (!this.#isComplete || this.#isClosed) return;
    this.#tell({ lost: member });
    this.onLost(member);
  }

  #tell(notice: Notice): void {
    for (const { socket } of this.#members.values()) if (socket) sendLine(socket, notice);
  }
}

/** Whether `begin` called its argument in time. */
export function waitFor(timeoutMs: number, begin: (done: () => void) => void): Promise<boolean> {
  return new Promise((resolve) => {
    const timer = setTimeout(() => resolve(false), timeoutMs);
    begin(() => {
      clearTimeout(timer);
      resolve(true);
    });
  });
}
