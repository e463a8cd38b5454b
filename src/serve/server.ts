/** The HTTP server: routes, authentication, limits, overload, draining, one log line per request. */
import { randomUUID } from 'node:crypto';
import type { IncomingMessage, Server, ServerResponse } from 'node:http';
import { UsageError } from '../errors.js';
import { bearerKey, hostName, isLoopback, Keys } from '../http/access.js';
import { sendError, sendJson } from '../http/answer.js';
import { Bodies } from '../http/body.js';
import { asHttpError, HttpError, tooBusy } from '../http/error.js';
import { listen } from '../http/listen.js';
import { addressOf, Router } from '../http/router.js';
import { longestText } from '../infer/prompt.js';
import { Answer, type Outcome } from './answer.js';
import type { ModelHost } from './host.js';
import { Metrics } from './metrics.js';
import type { ListenOptions } from './options.js';
import { type Job, type ServedModel, servedModel } from './protocol.js';
import { messagesError } from './protocols/messages.js';
import { Readings } from './reading.js';
import { RequestReader } from './request-reader.js';
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

const MAX_BODY = 16 * 2 ** 20;
const KEEP_ALIVE_SECONDS = 1;
/** Tokens and log-probabilities that all answers together may list. */
const MAX_LISTED = 2 ** 23;

/** Shares of the limits that an answer takes. */
type Load = Pick<Job, 'choices' | 'promptTokens' | 'listed'>;

/** Kinds of bodies that a text answers. */
type CompletionKind = 'completion' | 'chat' | 'responses' | 'messages';

/** Beginnings of the ids of answers. */
const PREFIXES: Readonly<Record<CompletionKind, string>> = {
  completion: 'cmpl-',
  chat: 'chatcmpl-',
  responses: 'resp_',
  messages: 'msg_',
};

/** The body of an error: clients read the form of their protocol only. */
function errorBody(path: string, error: HttpError): object {
  return path.startsWith('/v1/messages') ? messagesError(error) : error.body;
}

/** A request whose route was found. */
interface Asked {
  /** Its number in the log. */
  readonly id: string;
  readonly request: IncomingMessage;
  readonly response: ServerResponse;
  /** The open parts of the path. */
  readonly params: readonly string[];
}

/** Sends the answer; returns what the log says about a completion, null for all else. */
type Handler = (asked: Asked) => Promise<Outcome | null> | null;

/** Listens. Without a host (the model is being loaded) all routes answer 503 until one is attached. */
export async function startServer(host: ModelHost | null, options: ServerOptions): Promise<RunningServer> {
  const { host: address = '127.0.0.1', port = 8080, keys = [] } = options;
  if (!isLoopback(address) && keys.length === 0)
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
  readonly reader: RequestReader;
}

class ModelServer {
  readonly #options: ServerOptions;
  /** Null while the model is being loaded. */
  #served: Served | null = null;
  readonly #metrics = new Metrics();
  readonly #isTrusted: boolean;
  readonly #keepAlive: NodeJS.Timeout;
  readonly #keys: Keys;
  readonly #routes: Router<Handler>;
  readonly #created = Math.floor(Date.now() / 1000);
  readonly #answers = new Set<Answer>();
  readonly #turns = new Turns();
  readonly #bodies = new Bodies();
  /** Sums over the answers that have not ended. */
  #load: Load = { choices: 0, promptTokens: 0, listed: 0 };
  #isDraining = false;
  /** Notes about the model that are in the log. */
  readonly #told = new Set<string>();

  /** `isTrusted`: requests were authenticated before they come here. */
  constructor(options: ServerOptions, isTrusted = false) {
    this.#options = options;
    this.#keys = new Keys(options.keys ?? []);
    this.#routes = new Router({ ...this.#modelRoutes(), ...this.#pageRoutes() });
    this.#isTrusted = isTrusted;
    this.#keepAlive = setInterval(() => {
      for (const answer of this.#answers) answer.keepAlive(KEEP_ALIVE_SECONDS);
    }, 500);
    this.#keepAlive.unref();
  }

  attach(host: ModelHost): void {
    const { id, chatTemplate } = this.#options;
    const model = servedModel(id, host.info, chatTemplate);
    this.#served = { host, model, readings: new Readings(host, id), reader: new RequestReader(model, chatTemplate) };
  }

  get #host(): ModelHost {
    return this.#ready.host;
  }

  get #model(): ServedModel {
    return this.#ready.model;
  }

  get #ready(): Served {
    if (this.#served) return this.#served;
    throw new HttpError(503, 'the model is being loaded', { headers: { 'retry-after': '5' } });
  }

  /** Throws while or since no request can be answered. */
  #expectHealthy(): void {
    const failure = this.#isDraining ? 'the server is draining' : this.#host.failure;
    if (failure !== null) throw new HttpError(503, failure, { headers: { 'retry-after': '5' } });
  }

  async listen(address: string, port: number): Promise<RunningServer> {
    const answer = (request: IncomingMessage, response: ServerResponse) => void this.answer(request, response);
    const isEssential = (request: IncomingMessage) => addressOf(request).path === '/health';
    const { server, url } = await listen(answer, address, port, { isEssential, allowHalfOpen: true });
    return {
      url,
      attach: (host) => this.attach(host),
      drain: (seconds) => this.#drain(server, seconds),
    };
  }

  /** Cancels what runs. */
  close(): void {
    clearInterval(this.#keepAlive);
    for (const answer of this.#answers) answer.cancel();
    this.#served?.readings.close();
    this.#served?.reader.close();
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
    const { path } = addressOf(request);
    let outcome: Outcome | null = null;
    let refusal: HttpError | null = null;
    try {
      response.setHeader('x-request-id', id);
      if (this.#options.corsOrigin !== undefined) allowOrigin(response, this.#options.corsOrigin);
      if (request.method === 'OPTIONS' && this.#options.corsOrigin !== undefined) response.writeHead(204).end();
      else outcome = await this.#route(request, response, path, id);
    } catch (error) {
      refusal = asHttpError(error);
      try {
        sendError(request, response, refusal, errorBody(path, refusal));
      } catch (second) {
        console.error(second);
        response.destroy();
      }
    }
    const ms = tenths(performance.now() - startedAt);
    const error = refusal ?? outcome?.error ?? null;
    if (error) this.#metrics.error(error.code);
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
        ...(error && { error: error.code, param: error.detail.param?.slice(0, 200) }),
      }),
    );
  }

  async #route(request: IncomingMessage, response: ServerResponse, path: string, id: string): Promise<Outcome | null> {
    if (!this.#isTrusted) this.#authenticate(request, path);
    const { handler, params } = this.#routes.find(request.method, path);
    return handler({ id, request, response, params });
  }

  #pageRoutes(): Record<string, Handler> {
    const pages = [...(this.#options.pages ?? [])];
    return Object.fromEntries(
      pages.map(([path, { headers, content }]) => [
        `GET ${path}`,
        ({ response }) => {
          response.writeHead(200, headers).end(content);
          return null;
        },
      ]),
    );
  }

  #modelRoutes(): Record<string, Handler> {
    const get = (value: (params: readonly string[]) => object): Handler => {
      return ({ response, params }) => {
        sendJson(response, JSON.stringify(value(params)));
        return null;
      };
    };
    const post = (kind: 'tokenize' | 'detokenize' | 'count'): Handler => {
      return async ({ request, response }) => {
        sendJson(response, await this.#bodies.read(request, MAX_BODY, (body) => this.#ready.reader.read(kind, body)));
        return null;
      };
    };
    return {
      'GET /health': get(() => {
        this.#expectHealthy();
        return { status: 'ok' };
      }),
      'GET /metrics': ({ response }) => {
        const text = this.#metrics.text(this.#host.stats());
        response.setHeader('content-type', 'text/plain; version=0.0.4; charset=utf-8');
        response.end(text);
        return null;
      },
      'GET /v1/models': get(() => ({ object: 'list', data: [this.#card()] })),
      'GET /v1/models/*': get((params) => {
        if (params.join('/') === this.#model.id) return this.#card();
        throw new HttpError(404, 'there is no such model', { param: 'model', code: 'model_not_found' });
      }),
      'POST /v1/completions': (asked) => this.#complete(asked, 'completion'),
      'POST /v1/chat/completions': (asked) => this.#complete(asked, 'chat'),
      'POST /v1/responses': (asked) => this.#complete(asked, 'responses'),
      'POST /v1/messages': (asked) => this.#complete(asked, 'messages'),
      'POST /v1/messages/count_tokens': post('count'),
      'POST /tokenize': post('tokenize'),
      'POST /detokenize': post('detokenize'),
      'POST /reader': (asked) => this.#read(asked),
      'GET /reader/*': get((params) => this.#ready.readings.answer(params)),
    };
  }

  async #complete({ request, response, id }: Asked, kind: CompletionKind): Promise<Outcome> {
    // Before the body is read: an overloaded server must not spend its time on requests that it refuses.
    this.#expectHealthy();
    this.#expectCapacity({ choices: 1, promptTokens: 0, listed: 0 });
    let answer: Answer | null = null;
    const begin = (job: Job) => {
      answer ??= this.#begin(job, response, id);
      return answer;
    };
    try {
      const { job, prompts } = await this.#bodies.read(request, MAX_BODY, (body) =>
        this.#ready.reader.read(kind, body, begin),
      );
      begin(job).submit(prompts);
    } catch (error) {
      if (answer === null) throw error;
      (answer as Answer).fail(error); // its beginning is sent: a text whose tokens do not fit
    }
    return (answer as unknown as Answer).done;
  }

  /** Counts an answer until it has ended, and sends its beginning. */
  #begin(job: Job, response: ServerResponse, id: string): Answer {
    // While the body was read; no 'close' would follow that ends the answer.
    if (response.destroyed) throw new HttpError(400, 'the client is gone');
    this.#expectHealthy();
    this.#expectCapacity(job);
    const { note } = job;
    if (note !== null && !this.#told.has(note)) {
      this.#told.add(note);
      this.#options.log?.(JSON.stringify({ time: new Date().toISOString(), note }));
    }
    const { id: model, tokenizer } = this.#model;
    const answer = new Answer(response, job, {
      id: `${PREFIXES[job.translated?.protocol ?? job.kind]}${id}`,
      errorBody: (error) => (job.translated?.protocol === 'messages' ? messagesError(error) : error.body),
      model,
      tokenizer,
      host: this.#host,
      metrics: this.#metrics,
      turns: this.#turns,
    });
    this.#count(job, 1);
    this.#answers.add(answer);
    void answer.done.then(() => {
      this.#answers.delete(answer);
      this.#count(job, -1);
    });
    answer.start(job.unknown.length > 0 ? { 'x-trefoil-warning': unknownFields(job.unknown) } : {});
    return answer;
  }

  #count({ choices, promptTokens, listed }: Load, sign: 1 | -1): void {
    const load = this.#load;
    this.#load = {
      choices: load.choices + sign * choices,
      promptTokens: load.promptTokens + sign * promptTokens,
      listed: load.listed + sign * listed,
    };
  }

  async #read({ request, response }: Asked): Promise<null> {
    const tokens = await this.#bodies.read(request, MAX_BODY, (body) => this.#ready.reader.read('reading', body));
    // One pass blocks the engine: it may delay requests that come later, but none that runs.
    if (this.#load.choices > 0) throw tooBusy('the model is answering other requests: try again later', 'reader_busy');
    await this.#ready.readings.stream(tokens, response);
    return null;
  }

  #card(): object {
    const { id, info, chat } = this.#model;
    const limits = { max_model_len: longestText(info), vocab_size: info.vocabulary, parameters: info.parameters };
    const has_chat_template = chat?.templates.has('default') ?? false;
    return { id, object: 'model', created: this.#created, owned_by: 'trefoil', ...limits, has_chat_template };
  }

  /** Decided here, from what was accepted: the engine may be inside a step and could not answer. */
  #expectCapacity({ choices, promptTokens, listed }: Load): void {
    const { maxBatch, maxContext } = this.#model.info;
    const { maxQueued = 256, maxQueuedTokens = (maxBatch + 8) * maxContext } = this.#options;
    const isIdle = this.#load.choices === 0;
    const reached =
      this.#load.choices + choices > maxBatch + maxQueued
        ? ['queue_full', `maxQueued (--max-queued) is ${maxQueued}`]
        : this.#load.promptTokens + promptTokens > maxQueuedTokens
          ? [
              'queued_tokens_full',
              `their prompts may have ${maxQueuedTokens} tokens together (maxQueuedTokens; more with --max-batch, --max-context)`,
            ]
          : this.#load.listed + listed > MAX_LISTED
            ? ['queued_lists_full', `their answers may list ${MAX_LISTED} tokens and log-probabilities together`]
            : null;
    if (isIdle || reached === null) return;
    const [code, limit] = reached;
    const rounds = Math.max(1, this.#load.choices / maxBatch);
    const seconds = Math.min(60, Math.max(1, Math.ceil(this.#metrics.meanSeconds * rounds)));
    const message = `the server has ${this.#load.choices} requests and its queue is full (${limit}): try again later`;
    throw tooBusy(message, code, seconds);
  }

  /** `/health` is open to all, and pages need no key: one has to be there before a key can be typed into it. */
  #authenticate(request: IncomingMessage, path: string): void {
    if (path === '/health') return;
    if (this.#keys.isEmpty) expectLocal(request, this.#options.corsOrigin);
    else if (!this.#options.pages?.has(path) && !this.#keys.has(bearerKey(request)))
      throw new HttpError(401, 'the API key is missing or wrong: send "Authorization: Bearer KEY"', {
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
  if (!isLoopback(hostName(headers.host)))
    throw new HttpError(403, 'without an API key the host must be 127.0.0.1, ::1 or localhost', { code: 'wrong_host' });
  const { origin } = headers;
  if (origin === undefined || origin === corsOrigin || isLoopback(hostName(origin.replace(/^https?:\/\//, '')))) return;
  throw new HttpError(403, 'without an API key web pages of other origins are refused', { code: 'wrong_origin' });
}

function tenths(value: number): number {
  return Math.round(value * 10) / 10;
}

function unknownFields(names: readonly string[]): string {
  const shown = names.map((name) => name.replace(/[^\w.-]/g, '?').slice(0, 60));
  return `unknown fields were ignored: ${shown.join(', ')}`;
}

function allowOrigin(response: ServerResponse, origin: string): void {
  response.setHeader('access-control-allow-origin', origin);
  response.setHeader('access-control-allow-headers', 'authorization, content-type');
  response.setHeader('access-control-allow-methods', 'GET, POST');
  response.setHeader('vary', 'origin');
}
