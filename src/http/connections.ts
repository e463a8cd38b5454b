/**
 * Connections of a server and what each is doing, so that a client cannot keep others out: when there are too many, the one
 * that does the least is closed.
 */
import type { IncomingMessage, Server, ServerResponse } from 'node:http';
import type { Socket } from 'node:net';

/** Connections that requests of all kinds may have. */
const MAX_CONNECTIONS = 1024;
/** Further ones, for requests that must always be answered. */
const RESERVED = 64;
/** Time that a new connection has to send its request before it counts as idle [ms]. */
const NEW_MS = 1000;

export class Connections {
  /** Without a request, the one that is idle for longest first. */
  readonly #idle = new Set<Socket>();
  /** With a request whose body is not complete, the oldest first. */
  readonly #reading = new Set<Socket>();
  /** With a request that is being answered. */
  readonly #answering = new Set<Socket>();
  /** When a connection began what it does [ms]. */
  readonly #since = new WeakMap<Socket, number>();
  /** Requests of a connection that have no complete answer. */
  readonly #requests = new WeakMap<Socket, number>();
  /** Connections beyond `MAX_CONNECTIONS`. */
  readonly #reserved = new WeakSet<Socket>();

  constructor(server: Server) {
    server.maxConnections = MAX_CONNECTIONS + RESERVED;
    server.on('connection', (socket: Socket) => {
      if (this.#count >= MAX_CONNECTIONS && !this.#closeOne()) this.#reserved.add(socket);
      this.#move(socket, this.#idle);
      socket.once('close', () => this.#forget(socket));
    });
  }

  /** Notes that a request began; returns whether its connection is one of the reserved ones. */
  begin(request: IncomingMessage, response: ServerResponse): boolean {
    const { socket, headers } = request;
    const hasBody = headers['transfer-encoding'] !== undefined || Number(headers['content-length'] ?? 0) > 0;
    this.#move(socket, hasBody ? this.#reading : this.#answering);
    this.#requests.set(socket, (this.#requests.get(socket) ?? 0) + 1);
    if (hasBody) request.once('end', () => this.#move(socket, this.#answering));
    response.once('close', () => {
      const left = (this.#requests.get(socket) ?? 1) - 1;
      this.#requests.set(socket, left);
      if (left === 0) this.#move(socket, this.#idle);
    });
    return this.#reserved.has(socket);
  }

  get #count(): number {
    return this.#idle.size + this.#reading.size + this.#answering.size;
  }

  /**
   * Closes an idle connection, or else one whose request is not complete; false if all are being answered. A new connection
   * is idle until its request arrives.
   */
  #closeOne(): boolean {
    const [idle] = this.#idle;
    const [reading] = this.#reading;
    const isIdle = idle && performance.now() - (this.#since.get(idle) ?? 0) > NEW_MS;
    const socket = isIdle ? idle : (reading ?? idle);
    if (!socket) return false;
    this.#forget(socket);
    socket.destroy();
    return true;
  }

  #move(socket: Socket, to: Set<Socket>): void {
    this.#forget(socket);
    this.#since.set(socket, performance.now());
    if (!socket.destroyed) to.add(socket);
  }

  #forget(socket: Socket): void {
    for (const set of [this.#idle, this.#reading, this.#answering]) set.delete(socket);
  }
}
