/** Writes an answer piece by piece, as fast as its client reads and without keeping the thread busy. */
import type { ServerResponse } from 'node:http';

/** Characters of one write of pieces that are made as they are written. */
const WRITE_SIZE = 2 ** 16;
/** Time after which other events of the thread come first [ms]. */
const TURN_MS = 5;
/** A client that reads nothing for this long is disconnected [ms]. */
const UNREAD_MS = 120_000;

export class PieceWriter {
  readonly #response: ServerResponse;
  readonly #queue: (string | Iterator<string>)[] = [];
  #unread = 0;
  #isWaiting = false;
  #isScheduled = false;
  #isEnded = false;
  #deadline: NodeJS.Timeout | undefined;

  constructor(response: ServerResponse) {
    this.#response = response;
    response.on('drain', () => {
      this.#isWaiting = false;
      clearTimeout(this.#deadline);
      // The system may take every piece at once, and each then leads here before any other event.
      if (typeof this.#queue[0] === 'object') this.#flushLater();
      else this.#flush();
    });
    response.on('close', () => {
      clearTimeout(this.#deadline);
      this.#queue.length = 0;
    });
  }

  /** Whether the client has not read what was written. */
  get isWaiting(): boolean {
    return this.#isWaiting;
  }

  /** Characters that were added as strings and are not written. */
  get unread(): number {
    return this.#unread;
  }

  /** Pieces of an iterator are made when they can be written. */
  add(pieces: string | Iterator<string>): void {
    if (this.#isEnded || pieces === '' || this.#response.destroyed) return;
    if (typeof pieces === 'string') this.#unread += pieces.length;
    this.#queue.push(pieces);
    this.#flush();
  }

  /** Ends the answer as soon as the client has read it. */
  end(): void {
    this.#isEnded = true;
    this.#flush();
  }

  /** An error in making or writing a piece ends this answer: its client has a part of it. */
  #flush(): void {
    if (this.#isWaiting || this.#isScheduled || this.#response.destroyed) return;
    try {
      this.#write();
    } catch (error) {
      console.error(error);
      this.#response.destroy();
    }
  }

  /** After other events. */
  #flushLater(): void {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    setImmediate(() => {
      this.#isScheduled = false;
      this.#flush();
    });
  }

  #write(): void {
    const startedAt = performance.now();
    while (this.#queue.length > 0) {
      const text = this.#next();
      if (text !== '') this.#isWaiting = !this.#response.write(text);
      if (this.#isWaiting) {
        this.#deadline = setTimeout(() => this.#response.destroy(), UNREAD_MS).unref();
        return;
      }
      if (this.#queue.length > 0 && performance.now() - startedAt > TURN_MS) {
        this.#flushLater();
        return;
      }
    }
    if (this.#isEnded && !this.#response.writableEnded) this.#response.end();
  }

  /** All strings up to the next iterator, or about `WRITE_SIZE` characters of an iterator. */
  #next(): string {
    let text = '';
    for (let first = this.#queue[0]; typeof first === 'string'; first = this.#queue[0]) {
      text += first;
      this.#queue.shift();
    }
    this.#unread -= text.length;
    const [pieces] = this.#queue;
    if (text !== '' || typeof pieces !== 'object') return text;
    while (text.length < WRITE_SIZE) {
      const { done, value } = pieces.next();
      if (done) {
        this.#queue.shift();
        break;
      }
      text += value;
    }
    return text;
  }
}
