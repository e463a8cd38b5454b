/** Server-sent events. */
import type { ServerResponse } from 'node:http';
import { PieceWriter } from './piece-writer.js';

/** Characters that a client may leave unread before it is disconnected. */
const MAX_UNREAD = 16 * 2 ** 20;

/** An event with data of one line, and optionally its name and the id that a reconnecting client sends back. */
export function eventFrame(data: string, { event, id }: { event?: string; id?: string } = {}): string {
  return `${id === undefined ? '' : `id: ${id}\n`}${event === undefined ? '' : `event: ${event}\n`}data: ${data}\n\n`;
}

/** A line that clients ignore. */
export function commentFrame(text: string): string {
  return `: ${text}\n\n`;
}

/** Writes frames to one client, which may read slowly. */
export class EventStream {
  readonly #response: ServerResponse;
  readonly #writer: PieceWriter;
  #wroteAt = performance.now();

  /** Sends the headers, `headers` among them. */
  constructor(response: ServerResponse, headers: Readonly<Record<string, string>> = {}) {
    this.#response = response;
    this.#writer = new PieceWriter(response);
    if (!response.hasHeader('cache-control')) response.setHeader('cache-control', 'no-cache');
    response.writeHead(200, {
      ...headers,
      'content-type': 'text/event-stream',
      'x-accel-buffering': 'no', // nginx would hold the events back
    });
  }

  /** Whether the client has not read what was sent. */
  get isWaiting(): boolean {
    return this.#writer.isWaiting;
  }

  /** One write per call, none while the client does not read. A client that is too far behind is disconnected. */
  send(frames: string): void {
    if (frames === '') return;
    this.#wroteAt = performance.now();
    this.#writer.add(frames);
    if (this.#writer.unread > MAX_UNREAD) this.#response.destroy();
  }

  /** Sends frames that are made as the client reads, so that there may be any number of them. */
  sendAll(frames: Iterator<string>): void {
    this.#wroteAt = performance.now();
    this.#writer.add(frames);
  }

  /** Ends the answer as soon as the client has read it. */
  end(): void {
    this.#writer.end();
  }

  /** Sends a comment if nothing was sent for `seconds`, so that proxies and people know that the stream is alive. */
  keepAlive(seconds: number): void {
    if (performance.now() - this.#wroteAt >= seconds * 1000) this.send(commentFrame('keep-alive'));
  }
}
