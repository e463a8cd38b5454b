/** Answers of one JSON value, and answers to requests that failed. */
import type { IncomingMessage, ServerResponse } from 'node:http';
import type { HttpError } from './error.js';

/** A body of at most this size is read and thrown away, so that the connection can be used again [bytes]. */
const SMALL_BODY = 2 ** 16;

export function sendJson(response: ServerResponse, text: string | Uint8Array): void {
  response.setHeader('content-type', 'application/json');
  response.end(text);
}

/** Sends `body` with the status and the headers of the error; ends an answer that has begun. */
export function sendError(
  request: IncomingMessage,
  response: ServerResponse,
  error: HttpError,
  body: object = error.body,
): void {
  if (response.headersSent || response.destroyed) {
    response.destroy();
    return;
  }
  // A body that is not read to its end cannot be followed by another request.
  const isSmall = Number(request.headers['content-length'] ?? Number.POSITIVE_INFINITY) <= SMALL_BODY;
  if (!request.complete && isSmall) request.resume();
  const close = request.complete || isSmall ? {} : { connection: 'close' };
  response.writeHead(error.status, { 'content-type': 'application/json', ...error.detail.headers, ...close });
  response.end(JSON.stringify(body));
}
