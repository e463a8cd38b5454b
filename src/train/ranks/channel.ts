/**
 * Authenticated connections between the ranks of a run: JSON lines over TCP after an HMAC challenge and response.
 *
 *     server -> client   { trefoil, service, nonce }
 *     client -> server   { nonce, hello, proof }     proof = HMAC-SHA256(key, [service, "client", both nonces, hello])
 *     server -> client   { refusal, proof }          proof = HMAC-SHA256(key, [service, "server", both nonces, refusal])
 *
 * Both ends prove that they know the key of the run (secret.ts) and never send it. A proof covers both nonces, so a
 * recorded handshake cannot be replayed. Until its proof is verified, a peer is limited in line length, in time, and in
 * the number of open connections. Lines are neither encrypted nor signed after the handshake: the key keeps strangers out,
 * but does not protect against an attacker who can change packets (SECURITY.md).
 */
import { createHmac, randomBytes, timingSafeEqual } from 'node:crypto';
import { type AddressInfo, connect, createServer, type Server, type Socket } from 'node:net';
import { TrefoilError } from '../../errors.js';
import { parseObject } from '../../files.js';

/** Incremented when ranks of two versions could not understand each other. */
const PROTOCOL = 3;
/** Limits for a peer that has not proved the key. */
const HANDSHAKE_MS = 10_000;
const HANDSHAKE_LINE = 4096;
const PENDING_CONNECTIONS = 64;
/** Values are small: addresses, ids, names. */
const LONGEST_LINE = 2 ** 20;
/** After this much silence the system probes the other machine, and closes the connection if it does not answer. */
const KEEP_ALIVE_MS = 10_000;

export type Line = Record<string, unknown>;
type Service = 'store' | 'lifeline';

/** Handlers of a client that has proved the key. */
export interface Peer {
  readonly onLine: (line: Line) => void;
  readonly onClose: () => void;
}

export interface ListenOptions {
  readonly service: Service;
  /** HMAC key of the run. */
  readonly key: string;
  /** Tried in order; 0 is any free port. */
  readonly ports: readonly number[];
  /** The address of this machine; other machines are accepted unless it is a loopback address. */
  readonly address: string;
  /** Connections to expect at the same time. */
  readonly expected: number;
  /** Called with the hello of a client that has proved the key. Returns its handlers, or why it is refused. */
  readonly admit: (hello: Line, socket: Socket) => Peer | string;
}

/** A listening port. */
export interface Listener {
  readonly port: number;
  /** Stops listening. Connections that were admitted stay open, all others are closed. */
  close(): void;
}

/** Listens on the first free port; null if none is free. */
export async function listen(options: ListenOptions): Promise<Listener | null> {
  const pending = new PendingConnections(options.expected + PENDING_CONNECTIONS);
  const server = createServer((socket) => accept(socket, options, pending));
  for (const port of options.ports) {
    if (!(await tryPort(server, port, options.address))) continue;
    server.on('error', () => {}); // a connection that could not be accepted (too many open files) is lost, no more
    const close = () => {
      server.close();
      pending.close();
    };
    return { port: (server.address() as AddressInfo).port, close };
  }
  return null;
}

/**
 * Connections whose handshake has not ended. Beyond `most` the oldest connection of the address that has the most is
 * closed: a flood displaces itself, and a rank, which needs one round trip, gets through.
 */
class PendingConnections {
  readonly #most: number;
  readonly #byAddress = new Map<string, Set<Socket>>();
  #count = 0;

  constructor(most: number) {
    this.#most = most;
  }

  /** Returns the function to call when the handshake of `socket` has ended. */
  add(socket: Socket): () => void {
    const address = socket.remoteAddress ?? '';
    const sockets = this.#byAddress.get(address) ?? new Set();
    this.#byAddress.set(address, sockets.add(socket));
    this.#count += 1;
    if (this.#count > this.#most) this.#displace();
    return () => this.#remove(address, socket);
  }

  close(): void {
    for (const sockets of this.#byAddress.values()) for (const socket of sockets) socket.destroy();
  }

  #remove(address: string, socket: Socket): void {
    const sockets = this.#byAddress.get(address);
    if (!sockets?.delete(socket)) return;
    this.#count -= 1;
    if (sockets.size === 0) this.#byAddress.delete(address);
  }

  #displace(): void {
    let [largest, from] = [new Set<Socket>(), ''];
    for (const [address, sockets] of this.#byAddress)
      if (sockets.size > largest.size) [largest, from] = [sockets, address];
    const [oldest] = largest;
    this.#remove(from, oldest);
    oldest.destroy();
  }
}

function accept(socket: Socket, { service, key, admit }: ListenOptions, pending: PendingConnections): void {
  const nonce = randomBytes(16).toString('hex');
  let peer: Peer | null = null;
  prepare(socket);
  const remove = pending.add(socket);
  const timer = setTimeout(() => socket.destroy(), HANDSHAKE_MS);
  const settle = () => {
    clearTimeout(timer);
    remove();
  };
  socket.once('close', () => {
    settle();
    peer?.onClose();
  });
  readLines(
    socket,
    () => (peer ? LONGEST_LINE : HANDSHAKE_LINE),
    (line) => {
      if (peer) return peer.onLine(line);
      const [theirs, text] = [textIn(line, 'nonce'), textIn(line, 'hello')];
      const isTrusted = isProof(prove(key, service, 'client', nonce, theirs, text), textIn(line, 'proof'));
      const hello = isTrusted ? parseObject(text) : undefined;
      if (!hello) {
        socket.destroy();
        return;
      }
      settle();
      const admitted = admit(hello, socket);
      const refusal = typeof admitted === 'string' ? admitted : '';
      sendLine(socket, { refusal, proof: prove(key, service, 'server', nonce, theirs, refusal) });
      if (typeof admitted === 'string') socket.end();
      else peer = admitted;
    },
  );
  sendLine(socket, { trefoil: PROTOCOL, service, nonce });
}

export interface ConnectOptions {
  readonly host: string;
  readonly port: number;
  readonly service: Service;
  readonly key: string;
  /** Sent with the proof; part of what it covers. */
  readonly hello: object;
  /** Time limit of connecting and of the handshake. */
  readonly timeoutMs: number;
}

/** A channel to a server that knows the key, that server's refusal, or why there is no such server at this port. */
export type Connected = Channel | { readonly refusal: string } | { readonly failure: string };

export function connectTo({ host, port, service, key, hello, timeoutMs }: ConnectOptions): Promise<Connected> {
  return new Promise((resolve) => {
    const socket = connect({ host, port });
    const channel = new Channel(socket);
    const own = randomBytes(16).toString('hex');
    const settle = (result: Connected) => {
      clearTimeout(timer);
      if (result !== channel) socket.destroy();
      resolve(result);
    };
    const fail = (reason: string) => settle({ failure: reason });
    const timer = setTimeout(() => fail(`port ${port} does not answer`), timeoutMs);
    socket.on('error', (error) => fail(error.message)); // an error after the handshake is followed by 'close'
    const onClose = () => fail(`port ${port} belongs to another run, or the ranks have different secrets`);
    const onAnswer = (line: Line, nonce: string) => {
      const refusal = textIn(line, 'refusal');
      if (!isProof(prove(key, service, 'server', nonce, own, refusal), textIn(line, 'proof'))) return onClose();
      channel.isTrusted = true;
      channel.pause();
      settle(refusal === '' ? channel : { refusal });
    };
    const onGreeting = (line: Line) => {
      const { trefoil, nonce } = line;
      if (typeof trefoil === 'number' && trefoil !== PROTOCOL)
        return fail(`port ${port} belongs to another version of trefoil`);
      if (trefoil !== PROTOCOL || line['service'] !== service || typeof nonce !== 'string')
        return fail(`port ${port} belongs to another program`);
      const text = JSON.stringify(hello);
      channel.listen((answer) => onAnswer(answer, nonce), onClose);
      channel.send({ nonce: own, hello: text, proof: prove(key, service, 'client', nonce, own, text) });
    };
    channel.listen(onGreeting, () => fail(`port ${port} hung up`));
  });
}

/** A client's end of a connection. Lines that arrive while nothing listens are kept. */
export class Channel {
  readonly socket: Socket;
  /** Whether the server has proved the key. */
  isTrusted = false;
  #backlog: Line[] = [];
  #isEnded = false;
  #onLine: ((line: Line) => void) | null = null;
  #onClose: () => void = () => {};

  constructor(socket: Socket) {
    this.socket = socket;
    prepare(socket);
    socket.on('close', () => {
      this.#isEnded = true;
      if (this.#onLine) this.#onClose();
    });
    readLines(
      socket,
      () => (this.isTrusted ? LONGEST_LINE : HANDSHAKE_LINE),
      (line) => (this.#onLine ? this.#onLine(line) : this.#backlog.push(line)),
    );
  }

  /** Passes every line, and the end of the connection, to these handlers. */
  listen(onLine: (line: Line) => void, onClose: () => void): void {
    this.#onLine = onLine;
    this.#onClose = onClose;
    this.#drain();
  }

  /** Keeps lines until the next `listen`. */
  pause(): void {
    this.#onLine = null;
  }

  send(value: object): void {
    sendLine(this.socket, value);
  }

  /** A handler may call `listen` or `pause`: it is looked up again for every line. */
  #drain(): void {
    while (this.#onLine && this.#backlog.length > 0) this.#onLine(this.#backlog.shift()!);
    if (this.#onLine && this.#isEnded) this.#onClose();
  }
}

function isLoopback(address: string): boolean {
  return address === 'localhost' || address === '::1' || address.startsWith('127.');
}

export function sendLine(socket: Socket, value: object): void {
  if (!socket.destroyed) socket.write(`${JSON.stringify(value)}\n`);
}

function prove(
  ...[key, service, role, server, client, text]: [string, Service, 'server' | 'client', string, string, string]
): string {
  const covered = JSON.stringify(['trefoil', PROTOCOL, service, role, server, client, text]);
  return createHmac('sha256', key).update(covered).digest('hex');
}

/** Anything but a string counts as empty: converting a value of a stranger to a string may throw. */
function textIn(line: Line, name: string): string {
  const value = line[name];
  return typeof value === 'string' ? value : '';
}

function isProof(expected: string, given: string): boolean {
  const [left, right] = [Buffer.from(expected), Buffer.from(given)];
  return left.length === right.length && timingSafeEqual(left, right);
}

function prepare(socket: Socket): void {
  socket.setNoDelay(true);
  socket.setKeepAlive(true, KEEP_ALIVE_MS);
  socket.on('error', () => {}); // 'close' follows, and is handled
}

/** Calls `onLine` with the value of every line. A line that is too long or not a JSON object ends the connection. */
function readLines(socket: Socket, longest: () => number, onLine: (value: Line) => void): void {
  let pieces = '';
  socket.setEncoding('utf8');
  socket.on('data', (chunk: string) => {
    pieces += chunk;
    for (let end = pieces.indexOf('\n'); end >= 0; end = pieces.indexOf('\n')) {
      const line = pieces.slice(0, end);
      pieces = pieces.slice(end + 1);
      const value = line.length <= longest() ? parseObject(line) : undefined;
      if (value === undefined) {
        socket.destroy();
        return;
      }
      onLine(value);
      if (socket.destroyed) return;
    }
    if (pieces.length > longest()) socket.destroy();
  });
}

function tryPort(server: Server, port: number, address: string): Promise<boolean> {
  return new Promise((resolve, reject) => {
    const onError = (error: NodeJS.ErrnoException) => {
      server.off('listening', onListening);
      if (error.code === 'EADDRINUSE' || error.code === 'EACCES') resolve(false);
      else reject(new TrefoilError(`cannot listen on port ${port}: ${error.message}`));
    };
    const onListening = () => {
      server.off('error', onError);
      resolve(true);
    };
    server.once('error', onError);
    server.once('listening', onListening);
    server.listen({ port, ...(isLoopback(address) && { host: address }) });
  });
}
