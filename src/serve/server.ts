/** The HTTP server: routes, authentication, limits, overload, draining, one log line per request. */
import { createHash, randomUUID, timingSafeEqual } from 'node:crypto';
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http';
import type { AddressInfo, Socket } from 'node:net';
import { createTokenizer } from '../data/tokenizer.js';
import { UsageError } from '../errors.js';
import { StructuredOutput } from '../infer/structured/structured-output.js';
import { Answer, type Outcome } from './answer.js';
import { parseBody } from './body.js';
import { ApiError, asApiError } from './errors.js';
import type { ModelHost } from './host.js';
import { listen } from './listen.js';
import { Metrics } from './metrics.js';
import type { ListenOptions } from './options.js';
import {
  detokenize,
  type Job,
  parseChat,
  parseCompletion,
  parseReading,
  type ServedModel,
  tokenize,
} from './protocol.js';
import { Readings } from './reading.js';
import { Turns } from './turns.js';

/** Options of a server. */
export interface ServerOptions extends ListenOptions {
  /** The name of the model in the API. */
  readonly id: string;
}

/** The routes of a model inside another server. */
export interface MountedModel {
  answer(request: IncomingMessage, response: ServerResponse): Promise<void>;
  close(): void;
}

/** A server that listens. */
export interface RunningServer {
  /** `http://HOST:PORT` */
  readonly url: string;
  /** Answers with this model from now on, if the server was started without one. */
  attach(host: ModelHost): void;
  /** Accepts no more requests, waits up to `seconds` for those under way, cancels the rest. */
  drain(seconds: number): Promise<void>;
}

const MOST_BODY = 16 * 2 ** 20;
const SMALL_BODY = 2 ** 16;
const MOST_CONNECTIONS = 1024;
const HEADER_MS = 10_000;
const BODY_MS = 60_000;
const KEEP_ALIVE_SECONDS = 1;
const LOOPBACK = new Set(['127.0.0.1', '::1', 'localhost']);

type Handler = (body: unknown) => object;

/** Listens. Without a host (the model is being loaded) all routes answer 503 until one is attached. */
export async function startServer(host: ModelHost | null, options: ServerOptions): Promise<RunningServer> {
  const { host: address = '127.0.0.1', port = 8080, keys = [] } = options;
  if (!LOOPBACK.has(address) && keys.length === 0)
    throw new UsageError(
      `--host ${address}: an address other than loopback needs --api-key or --api-key-file (in a program: keys)`,
    );
  const unusable = keys.findIndex((key) => !/^[\x21-\x7e]+$/.test(key)); // clients could not send it in a header
  if (unusable >= 0)
    throw new UsageError(`API key ${unusable + 1}: a key is one or more printable ASCII characters without spaces`);
  const server = new ModelServer(options);
  if (host) server.attach(host);
  return server.listen(address, port);
}

/** The routes for a server that has its own socket and has authenticated the requests it passes on. */
export function mountModel(host: ModelHost, options: Pick<ServerOptions, 'id' | 'chatTemplate'>): MountedModel {
  const server = new ModelServer(options, true);
  server.attach(host);
  return { answer: (request, response) => server.answer(request, response), close: () => server.close() };
}

/** A model that is loaded. */
interface Served {
  readonly host: ModelHost;
  readonly model: ServedModel;
  readonly readings: Readings;
}

class ModelServer {
  readonly #options: ServerOptions;
  /** Null while the model is being loaded. */
  #served: Served | null = null;
  readonly #metrics = new Metrics();
  readonly #isTrusted: boolean;
  readonly #keepAlive: NodeJS.Timeout;
  readonly #keys: readonly Buffer[];
  readonly #created = Math.floor(Date.now() / 1000);
  readonly #answers = new Set<Answer>();
  readonly #turns = new Turns();
  /** Choices and tokens of prompts that were accepted and have not ended. */
  #load = { choices: 0, tokens: 0 };
  #isDraining = false;

  /** `isTrusted`: requests were authenticated before they come here. */
  constructor(options: ServerOptions, isTrusted = false) {
    this.#options = options;
    this.#keys = (options.keys ?? []).map(digest);
    this.#isTrusted = isTrusted;
    this.#keepAlive = setInterval(() => {
      for (const answer of this.#answers) answer.keepAlive(KEEP_ALIVE_SECONDS);
    }, 500);
    this.#keepAlive.unref();
  }

  attach(host: ModelHost): void {
    const { info } = host;
    const { id, chatTemplate } = this.#options;
    const tokenizer = createTokenizer(info.tokenizer);
    const chat =
      chatTemplate === undefined
        ? (tokenizer.chat ?? null)
        : { templates: new Map([['default', chatTemplate]]), variables: tokenizer.chat?.variables ?? {} };
    const structured = new StructuredOutput(tokenizer, info.vocabulary, []);
    this.#served = { host, model: { id, info, tokenizer, chat, structured }, readings: new Readings(host, id) };
  }

  get #host(): ModelHost {
    return this.#ready.host;
  }

  get #model(): ServedModel {
    return this.#ready.model;
  }

  get #ready(): Served {
    if (this.#served) return this.#served;
    throw new ApiError(503, 'the model is being loaded', { headers: { 'retry-after': '5' } });
  }

  /** Throws while or since no request can be answered. */
  #expectHealthy(): void {
    const failure = this.#isDraining ? 'the server is draining' : this.#host.failure;
    if (failure !== null) throw new ApiError(503, failure, { headers: { 'retry-after': '5' } });
  }

  async listen(address: string, port: number): Promise<RunningServer> {
    const server = createServer(
      {
        headersTimeout: HEADER_MS,
        requestTimeout: BODY_MS,
        connectionsCheckingInterval: 1000,
        keepAliveTimeout: 65_000,
      },
      (request, response) => void this.answer(request, response),
    );
    server.maxConnections = MOST_CONNECTIONS;
    server.on('clientError', refuseConnection);
    await listen(server, address, port);
    const bound = server.address() as AddressInfo;
    const name = bound.family === 'IPv6' ? `[${bound.address}]` : bound.address;
    return {
      url: `http://${name}:${bound.port}`,
      attach: (host) => this.attach(host),
      drain: (seconds) => this.#drain(server, seconds),
    };
  }

  /** Cancels what runs. */
  close(): void {
    clearInterval(this.#keepAlive);
    for (const answer of this.#answers) answer.cancel();
    this.#served?.readings.close();
  }

  async #drain(server: Server, seconds: number): Promise<void> {
    this.#isDraining = true;
    const closed = new Promise<void>((resolve) => server.close(() => resolve()));
    server.closeIdleConnections();
    const all = Promise.all([...this.#answers].map(({ done }) => done));
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<void>((resolve) => {
      timer = setTimeout(resolve, seconds * 1000);
    });
    await Promise.race([all, late]);
    clearTimeout(timer);
    this.close();
    await Promise.race([all, new Promise((resolve) => setTimeout(resolve, 1000))]);
    server.closeAllConnections();
    await closed;
  }

  async answer(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const startedAt = performance.now();
    const id = randomUUID();
    const path = (request.url ?? '/').split('?')[0];
    response.setHeader('x-request-id', id);
    if (this.#options.corsOrigin !== undefined) allowOrigin(response, this.#options.corsOrigin);
    let outcome: Outcome | null = null;
    try {
      if (request.method === 'OPTIONS' && this.#options.corsOrigin !== undefined) response.writeHead(204).end();
      else outcome = await this.#route(request, response, path, id);
    } catch (error) {
      sendError(request, response, asApiError(error));
    }
    const ms = tenths(performance.now() - startedAt);
    const detail = outcome
      ? {
          usage: outcome.usage,
          finish: outcome.finish,
          first_token_ms: outcome.firstTokenMs && tenths(outcome.firstTokenMs),
        }
      : {};
    this.#options.log?.(
      JSON.stringify({
        time: new Date().toISOString(),
        id,
        method: request.method,
        path: path.slice(0, 200),
        status: response.statusCode,
        ms,
        ...detail,
      }),
    );
  }

  async #route(request: IncomingMessage, response: ServerResponse, path: string, id: string): Promise<Outcome | null> {
    if (path === '/health') {
      expectMethod(request, 'GET');
      this.#expectHealthy();
      sendJson(response, { status: 'ok' });
      return null;
    }
    const page = this.#options.pages?.get(path);
    if (page) {
      if (this.#keys.length === 0) expectLocal(request, this.#options.corsOrigin);
      expectMethod(request, 'GET');
      response.writeHead(200, page.headers).end(page.content);
      return null;
    }
    if (!this.#isTrusted) this.#authenticate(request);
    const posts: Record<string, Handler> = {
      '/tokenize': (body) => tokenize(body, this.#model),
      '/detokenize': (body) => detokenize(body, this.#model),
    };
    if (path === '/v1/completions' || path === '/v1/chat/completions') {
      expectMethod(request, 'POST');
      // Before the body is read: an overloaded server must not spend its time on requests that it refuses.
      this.#expectHealthy();
      this.#expectCapacity({ choices: 1, tokens: 0 });
      const body = await readBody(request);
      const job = path === '/v1/completions' ? parseCompletion(body, this.#model) : parseChat(body, this.#model);
      return this.#answer(job, response, id);
    }
    if (path === '/reader') {
      expectMethod(request, 'POST');
      const tokens = parseReading(await readBody(request), this.#model);
      // One pass blocks the engine: it may delay requests that come later, but none that runs.
      if (this.#load.choices > 0)
        throw new ApiError(429, 'the model is answering other requests: try again later', {
          type: 'rate_limit_error',
          code: 'reader_busy',
          headers: { 'retry-after': '5' },
        });
      await this.#ready.readings.stream(tokens, response);
      return null;
    }
    if (Object.hasOwn(posts, path)) {
      expectMethod(request, 'POST');
      sendJson(response, posts[path](await readBody(request)));
      return null;
    }
    expectMethod(request, 'GET');
    if (path === '/metrics') {
      response.setHeader('content-type', 'text/plain; version=0.0.4; charset=utf-8');
      response.end(this.#metrics.text(this.#host.stats()));
    } else if (path === '/v1/models') sendJson(response, { object: 'list', data: [this.#card()] });
    else if (path === `/v1/models/${encodeURIComponent(this.#model.id)}`) sendJson(response, this.#card());
    else if (path.startsWith('/reader/')) sendJson(response, this.#ready.readings.answer(path.split('/').slice(2)));
    else if (path.startsWith('/v1/models/'))
      throw new ApiError(404, 'there is no such model', { param: 'model', code: 'model_not_found' });
    else throw new ApiError(404, 'there is no such route', { code: 'unknown_url' });
    return null;
  }

  #card(): object {
    const { id, info, chat } = this.#model;
    const limits = { max_model_len: info.maxContext, vocab_size: info.vocabulary, parameters: info.parameters };
    const has_chat_template = chat?.templates.has('default') ?? false;
    return { id, object: 'model', created: this.#created, owned_by: 'trefoil', ...limits, has_chat_template };
  }

  async #answer(job: Job, response: ServerResponse, id: string): Promise<Outcome> {
    this.#expectHealthy();
    const load = {
      choices: job.prompts.length * job.n,
      tokens: job.promptTokens,
    };
    this.#expectCapacity(load);
    const prefix = job.kind === 'chat' ? 'chatcmpl' : 'cmpl';
    const { id: model, tokenizer } = this.#model;
    const answer = new Answer(response, job, {
      id: `${prefix}-${id}`,
      model,
      tokenizer,
      host: this.#host,
      metrics: this.#metrics,
      turns: this.#turns,
    });
    this.#load = { choices: this.#load.choices + load.choices, tokens: this.#load.tokens + load.tokens };
    this.#answers.add(answer);
    try {
      answer.start(job.unknown.length > 0 ? { 'x-trefoil-warning': unknownFields(job.unknown) } : {});
      return await answer.done;
    } finally {
      this.#answers.delete(answer);
      this.#load = { choices: this.#load.choices - load.choices, tokens: this.#load.tokens - load.tokens };
    }
  }

  /** Decided here, from what was accepted: the engine may be inside a step and could not answer. */
  #expectCapacity({ choices, tokens }: { choices: number; tokens: number }): void {
    const { maxBatch, maxContext } = this.#model.info;
    const { maxQueued = 256, maxQueuedTokens = (maxBatch + 8) * maxContext } = this.#options;
    const isIdle = this.#load.choices === 0;
    const fits = this.#load.choices + choices <= maxBatch + maxQueued;
    if (isIdle || (fits && this.#load.tokens + tokens <= maxQueuedTokens)) return;
    const rounds = Math.max(1, this.#load.choices / maxBatch);
    const seconds = Math.min(60, Math.max(1, Math.ceil(this.#metrics.meanSeconds * rounds)));
    throw new ApiError(429, `the server has ${this.#load.choices} requests and its queue is full: try again later`, {
      type: 'rate_limit_error',
      code: 'queue_full',
      headers: { 'retry-after': String(seconds) },
    });
  }

  #authenticate(request: IncomingMessage): void {
    if (this.#keys.length === 0) {
      expectLocal(request, this.#options.corsOrigin);
      return;
    }
    const [scheme, key = ''] = (request.headers.authorization ?? '').split(' ');
    const given = digest(key);
    // All keys are compared, each in constant time: the time tells nothing about them.
    const matches = this.#keys.map((known) => timingSafeEqual(known, given));
    if (scheme.toLowerCase() === 'bearer' && matches.includes(true)) return;
    throw new ApiError(401, 'the API key is missing or wrong: send "Authorization: Bearer KEY"', {
      code: 'invalid_api_key',
      headers: { 'www-authenticate': 'Bearer' },
    });
  }
}

/**
 * Without a key the server is open to programs on this machine, not to web pages. A page whose name resolves to the
 * loopback address (DNS rebinding) sends its own name as host; any other page sends its origin.
 */
function expectLocal({ headers }: IncomingMessage, corsOrigin: string | undefined): void {
  const isLoopback = (host: string) =>
    LOOPBACK.has(
      host
        .replace(/:\d+$/, '')
        .replace(/^\[|\]$/g, '')
        .toLowerCase(),
    );
  if (!isLoopback(headers.host ?? ''))
    throw new ApiError(403, 'without an API key the host must be 127.0.0.1, ::1 or localhost', { code: 'wrong_host' });
  const { origin } = headers;
  if (origin === undefined || origin === corsOrigin || isLoopback(origin.replace(/^https?:\/\//, ''))) return;
  throw new ApiError(403, 'without an API key web pages of other origins are refused', { code: 'wrong_origin' });
}

function tenths(value: number): number {
  return Math.round(value * 10) / 10;
}

function digest(key: string): Buffer {
  return createHash('sha256').update(key).digest();
}

function unknownFields(names: readonly string[]): string {
  const shown = names.slice(0, 20).map((name) => name.replace(/[^\w.-]/g, '?').slice(0, 60));
  return `unknown fields were ignored: ${shown.join(', ')}`;
}

function expectMethod(request: IncomingMessage, method: string): void {
  if (request.method === method || (method === 'GET' && request.method === 'HEAD')) return;
  throw new ApiError(405, `use ${method} for this route`, { headers: { allow: method } });
}

/** Bodies are put together here to be parsed, unless they are longer. */
const wholeBody = Buffer.alloc(2 ** 20);

async function readBody(request: IncomingMessage): Promise<unknown> {
  const pieces = await bodyPieces(request);
  try {
    return parseBody(pieces.length === 1 ? pieces[0] : joined(pieces));
  } catch {
    throw new ApiError(400, 'the body is not JSON in UTF-8');
  }
}

/** Valid until the next call. */
function joined(pieces: readonly Buffer[]): Buffer {
  let bytes = 0;
  for (const piece of pieces) {
    if (bytes + piece.length > wholeBody.length) return Buffer.concat(pieces);
    piece.copy(wholeBody, bytes);
    bytes += piece.length;
  }
  return wholeBody.subarray(0, bytes);
}

/** By events, not by an iterator: that takes as long as the rest of a short request. */
function bodyPieces(request: IncomingMessage): Promise<readonly Buffer[]> {
  return new Promise((resolve, reject) => {
    const pieces: Buffer[] = [];
    let bytes = 0;
    const expectFitting = (size: number) => {
      if (size <= MOST_BODY) return true;
      request.pause();
      reject(new ApiError(413, `the body is larger than ${MOST_BODY / 2 ** 20} MiB`, { code: 'body_too_large' }));
      return false;
    };
    if (!expectFitting(Number(request.headers['content-length'] ?? 0))) return;
    request.on('data', (piece: Buffer) => {
      bytes += piece.length;
      if (expectFitting(bytes)) pieces.push(piece);
    });
    request.on('end', () => resolve(pieces));
    const leave = () => {
      if (!request.complete) reject(new ApiError(400, 'the body ended early'));
    };
    request.on('error', leave);
    request.on('close', leave);
  });
}

function sendJson(response: ServerResponse, value: object): void {
  response.setHeader('content-type', 'application/json');
  response.end(JSON.stringify(value));
}

function sendError(request: IncomingMessage, response: ServerResponse, error: ApiError): void {
  if (response.headersSent || response.destroyed) {
    response.destroy();
    return;
  }
  // A body that is not read to its end cannot be followed by another request. A small one is, and thrown away.
  const isSmall = Number(request.headers['content-length'] ?? Number.POSITIVE_INFINITY) <= SMALL_BODY;
  if (!request.complete && isSmall) request.resume();
  const close = request.complete || isSmall ? {} : { connection: 'close' };
  response.writeHead(error.status, { 'content-type': 'application/json', ...error.headers, ...close });
  response.end(JSON.stringify(error.body));
}

function allowOrigin(response: ServerResponse, origin: string): void {
  response.setHeader('access-control-allow-origin', origin);
  response.setHeader('access-control-allow-headers', 'authorization, content-type');
  response.setHeader('access-control-allow-methods', 'GET, POST');
  response.setHeader('vary', 'origin');
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
  const body = JSON.stringify(new ApiError(Number(status.slice(0, 3)), status.slice(4).toLowerCase()).body);
  socket.end(
    `HTTP/1.1 ${status}\r\ncontent-type: application/json\r\ncontent-length: ${body.length}\r\nconnection: close\r\n\r\n${body}`,
  );
}
