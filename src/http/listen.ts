/** A server at its address: limits of connections, and errors that name the flag and the remedy. */
import { createServer, type IncomingMessage, type RequestListener, type Server } from 'node:http';
import type { AddressInfo, Socket } from 'node:net';
import { UsageError } from '../errors.js';
import { errorCode } from '../files.js';
import { sendError } from './answer.js';
import { Connections } from './connections.js';
import { HttpError } from './error.js';

const LAST_PORT = 65_535;
const HEADER_MS = 10_000;
const BODY_MS = 60_000;
const TRY_AGAIN = { headers: { 'retry-after': '1', connection: 'close' } };

/** A server that accepts connections. */
export interface Listening {
  readonly server: Server;
  /** `http://HOST:PORT` */
  readonly url: string;
}

export interface ListenSettings {
  /** Requests that are answered also when there are too many connections. They must take no time. */
  readonly isEssential?: (request: IncomingMessage) => boolean;
  /** Whether a client that has sent its request and closed its side of the connection is answered. */
  readonly allowHalfOpen?: boolean;
}

/** Resolves when the server accepts connections. Throws a `UsageError` if it cannot. */
export async function listen(
  handle: RequestListener,
  host: string,
  port: number,
  { isEssential = () => false, allowHalfOpen = false }: ListenSettings = {},
): Promise<Listening> {
  if (port > LAST_PORT) throw new UsageError(`--port ${port}: the last port is ${LAST_PORT}`);
  const server = createServer(
    {
      headersTimeout: HEADER_MS,
      requestTimeout: BODY_MS,
      connectionsCheckingInterval: 1000,
      keepAliveTimeout: 65_000,
    },
    (request, response) => {
      response.on('error', () => {}); // the client is gone: 'close' follows
      if (connections.begin(request, response) && !isEssential(request))
        sendError(request, response, new HttpError(503, 'too many connections: try again later', TRY_AGAIN));
      else handle(request, response);
    },
  );
  const connections = new Connections(server);
  // Part of every http.Server, but not of its types.
  Object.assign(server, { httpAllowHalfOpen: allowHalfOpen });
  server.on('clientError', refuseConnection);
  await new Promise<void>((resolve, reject) => {
    server.once('error', (error) => reject(refusal(error, host, port)));
    server.listen(port, host, resolve);
  });
  const bound = server.address() as AddressInfo;
  const name = bound.family === 'IPv6' ? `[${bound.address}]` : bound.address;
  return { server, url: `http://${name}:${bound.port}` };
}

function refusal(error: Error, host: string, port: number): UsageError {
  const reasons: Record<string, string> = {
    EADDRINUSE: `--port ${port}: the port is in use; choose another, or 0 for a free one`,
    EACCES: `--port ${port}: permission denied; choose a port above 1023`,
    EADDRNOTAVAIL: `--host ${host}: not an address of this machine; 0.0.0.0 stands for all of them`,
    ENOTFOUND: `--host ${host}: there is no such host; give an address of this machine, or 0.0.0.0 for all of them`,
  };
  return new UsageError(
    reasons[errorCode(error) ?? ''] ?? `--host ${host} --port ${port}: cannot listen (${error.message})`,
  );
}

/** Requests that are not HTTP, or whose headers are too large or too slow. */
function refuseConnection(error: NodeJS.ErrnoException, socket: Socket): void {
  if (!socket.writable || error.code === 'ECONNRESET') {
    socket.destroy();
    return;
  }
  const statuses: Record<string, string> = {
    HPE_HEADER_OVERFLOW: '431 Request Header Fields Too Large',
    ERR_HTTP_REQUEST_TIMEOUT: '408 Request Timeout',
  };
  const status = statuses[error.code ?? ''] ?? '400 Bad Request';
  const body = JSON.stringify(new HttpError(Number(status.slice(0, 3)), status.slice(4).toLowerCase()).body);
  socket.end(
    `HTTP/1.1 ${status}\r\ncontent-type: application/json\r\ncontent-length: ${body.length}\r\nconnection: close\r\n\r\n${body}`,
  );
}
