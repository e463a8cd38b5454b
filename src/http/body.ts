/** Bodies of requests, up to a limit. */
import type { IncomingMessage } from 'node:http';
import { HttpError } from './error.js';

/** Bodies are put together here to be parsed, unless they are longer. */
const wholeBody = Buffer.alloc(2 ** 20);

/** Bodies of all requests of a server that are not complete or not handled, together [bytes]. */
const MAX_HELD = 2 ** 28;

/** Reads the bodies of a server's requests, which together have a limit. */
export class Bodies {
  #held = 0;
  /** Those that are not complete, the one that is silent for longest first. */
  readonly #unfinished = new Set<Upload>();

  /**
   * Calls `use` with the body of a request, of at most `most` bytes. They are valid until `use` returns, and counted until
   * its promise is settled. Beyond the limit of all bodies the one that is silent for longest is refused.
   */
  async read<T>(request: IncomingMessage, most: number, use: (body: Buffer) => T | Promise<T>): Promise<T> {
    const upload = new Upload(request, most, (upload, bytes) => this.#grow(upload, bytes));
    this.#unfinished.add(upload);
    try {
      const pieces = await upload.done.finally(() => this.#unfinished.delete(upload));
      return await use(pieces.length === 1 ? pieces[0] : joined(pieces));
    } finally {
      this.#held -= upload.bytes;
    }
  }

  #grow(upload: Upload, bytes: number): void {
    this.#held += bytes;
    this.#unfinished.delete(upload);
    this.#unfinished.add(upload);
    for (const stalest of this.#unfinished) {
      if (this.#held <= MAX_HELD) return;
      this.#unfinished.delete(stalest);
      this.#held -= stalest.bytes;
      stalest.refuse();
    }
  }
}

/** The body of one request, where bodies are few and small. */
export function readBody(request: IncomingMessage, most: number): Promise<Buffer> {
  return new Bodies().read(request, most, (body) => body);
}

/** A body on its way. */
class Upload {
  readonly done: Promise<readonly Buffer[]>;
  bytes = 0;
  readonly #request: IncomingMessage;
  readonly #pieces: Buffer[] = [];
  #reject!: (error: HttpError) => void;

  constructor(request: IncomingMessage, most: number, onPiece: (upload: Upload, bytes: number) => void) {
    this.#request = request;
    // By events, not by an iterator: that takes as long as the rest of a short request.
    this.done = new Promise((resolve, reject) => {
      this.#reject = reject;
      if (Number(request.headers['content-length'] ?? 0) > most) {
        this.#tooLarge(most);
        return;
      }
      request.on('data', (piece: Buffer) => {
        this.#pieces.push(piece);
        this.bytes += piece.length;
        onPiece(this, piece.length);
        if (this.bytes > most) this.#tooLarge(most);
      });
      request.on('end', () => resolve(this.#pieces));
      const leave = () => {
        if (!request.complete) reject(new HttpError(400, 'the body ended early'));
      };
      request.on('error', leave);
      request.on('close', leave);
    });
  }

  /** Gives its memory back. */
  refuse(): void {
    this.#end(
      new HttpError(503, 'too many large bodies are on their way: try again later', {
        headers: { 'retry-after': '1' },
      }),
    );
    this.bytes = 0;
  }

  #tooLarge(most: number): void {
    this.#end(new HttpError(413, `the body is larger than ${sizeName(most)}`, { code: 'body_too_large' }));
  }

  #end(error: HttpError): void {
    this.#request.pause();
    this.#request.removeAllListeners('data');
    this.#pieces.length = 0;
    this.#reject(error);
  }
}

function joined(pieces: readonly Buffer[]): Buffer {
  let bytes = 0;
  for (const piece of pieces) {
    if (bytes + piece.length > wholeBody.length) return Buffer.concat(pieces);
    piece.copy(wholeBody, bytes);
    bytes += piece.length;
  }
  return wholeBody.subarray(0, bytes);
}

function sizeName(bytes: number): string {
  return bytes >= 2 ** 20 ? `${bytes / 2 ** 20} MiB` : `${bytes / 2 ** 10} KiB`;
}
