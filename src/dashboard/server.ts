/** The HTTP server of the dashboard: pages, run data, streams, and the two writes (halt and save). */
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { join } from 'node:path';
import { TrefoilError } from '../errors.js';
import { TraceFile } from '../infer/trace-file.js';
import { toJson } from '../run/json.js';
import { runPaths } from '../run/paths.js';
import { trefoilVersion } from '../run/version.js';
import type { ModelHost } from '../serve/host.js';
import { listen } from '../serve/listen.js';
import { type MountedModel, mountModel } from '../serve/server.js';
import type { Thresholds } from '../watch/thresholds.js';
import type { Table } from './answers.js';
import { loadAssets } from './assets.js';
import { encodeChartData } from './chart-data.js';
import { type Control, requestHalt, requestSave } from './control.js';
import { readOverview } from './overview.js';
import { listTraces, readJson, readRecords } from './run-files.js';
import type { LogKind } from './run-log.js';
import { type FoundRun, Runs } from './runs.js';
import {
  HEADERS,
  hasTokenCookie,
  hasTokenHeader,
  isEqual,
  isLoopback,
  isOwnHost,
  newToken,
  tokenCookie,
} from './security.js';
import { parseOffsets, streamRows, streamTable } from './stream.js';

export interface DashboardOptions {
  /** A run, or a folder that holds some. */
  readonly dir: string;
  readonly host: string;
  /** 0 takes a free port. */
  readonly port: number;
  readonly thresholds: Thresholds;
  /** Default: a random one. */
  readonly token?: string;
  /** A model for the playground, with its name. The caller closes it. */
  readonly model?: { readonly host: ModelHost; readonly id: string };
}

export interface Dashboard {
  /** `http://HOST:PORT` */
  readonly url: string;
  /** Allows halting and saving; on an address other than loopback also reading. */
  readonly token: string;
  close(): Promise<void>;
}

const BODY_BYTES = 4096;
const MOST_STREAMS = 64;
/** A request waits this long for a log that is being read, then gets what is there. */
const READ_MS = 400;
const LOG_KINDS = new Set<string>(['heartbeat', 'training', 'val'] satisfies LogKind[]);

/** First parts of the paths that belong to the model. */
const MODEL_ROUTES = new Set(['v1', 'reader']);

/** An answer with a status other than 200. */
class Refusal extends Error {
  readonly status: number;

  constructor(status: number, message: string) {
    super(message);
    this.status = status;
  }
}

export async function startDashboard(options: DashboardOptions): Promise<Dashboard> {
  const token = options.token ?? newToken();
  const handler = new Handler(options, token);
  const server = createServer({ headersTimeout: 10_000, requestTimeout: 30_000 }, (request, response) => {
    void handler.answer(request, response);
  });
  await listen(server, options.host, options.port);
  const { port } = server.address() as AddressInfo;
  const host = options.host.includes(':') ? `[${options.host}]` : options.host;
  const close = () =>
    new Promise<void>((resolve) => {
      handler.close();
      server.close(() => resolve());
      server.closeAllConnections();
    });
  return { url: `http://${host}:${port}`, token, close };
}

type Query = URLSearchParams;

/** What an answer about a run may depend on besides the run. */
interface Asked {
  readonly query: Query;
  /** The parts of the path after the kind of answer. */
  readonly rest: readonly string[];
  readonly response: ServerResponse;
}

/** Returns the JSON of the answer; undefined if it was sent already. */
type Answer = (run: FoundRun, asked: Asked) => unknown;

class Handler {
  readonly #runs: Runs;
  readonly #options: DashboardOptions;
  readonly #token: string;
  readonly #model: MountedModel | null;
  readonly #assets: ReturnType<typeof loadAssets>;
  #streams = 0;

  constructor(options: DashboardOptions, token: string) {
    this.#runs = new Runs(options.dir, options.thresholds);
    this.#options = options;
    this.#token = token;
    this.#model = options.model ? mountModel(options.model.host, { id: options.model.id }) : null;
    this.#assets = loadAssets(options.model ? ['runs', 'model'] : ['runs']);
  }

  close(): void {
    this.#model?.close();
  }

  async answer(request: IncomingMessage, response: ServerResponse): Promise<void> {
    for (const [name, value] of Object.entries(HEADERS)) response.setHeader(name, value);
    try {
      await this.#route(request, response);
    } catch (error) {
      if (response.headersSent) {
        response.destroy();
        return;
      }
      if (error instanceof Refusal) sendJson(response, { error: error.message }, error.status);
      else if (error instanceof TrefoilError) sendJson(response, { error: this.#runs.hidePaths(error.message) }, 422);
      else {
        // A defect of the program: its details belong to the terminal, not to the page.
        console.error(error);
        sendJson(response, { error: 'internal error; see the terminal of the dashboard' }, 500);
      }
    }
  }

  async #route(request: IncomingMessage, response: ServerResponse): Promise<void> {
    if (!isOwnHost(request.headers.host, this.#options.host))
      throw new Refusal(421, 'the Host header does not name this server');
    const url = parseUrl(request.url);
    if (!isLoopback(this.#options.host) && !this.#login(request, response, url)) return;
    const isRead = request.method === 'GET' || request.method === 'HEAD';
    if (!isRead) expectOwnOrigin(request);
    const parts = url.pathname.split('/').slice(1).map(decode);
    if (this.#model && MODEL_ROUTES.has(parts[0])) return this.#model.answer(request, response);
    if (parts[0] !== 'api') {
      if (!isRead) throw new Refusal(405, 'only GET');
      return this.#asset(url.pathname, response);
    }
    if (!isRead) return sendJson(response, await this.#write(request, parts));
    const [, first, name, what = 'overview', ...rest] = parts;
    if (first === 'runs' && name === undefined) return sendJson(response, await this.#table());
    if (first === 'stream') return this.#stream(request, url.searchParams, response);
    const answer = first === 'runs' && Object.hasOwn(this.#answers, what) ? this.#answers[what] : undefined;
    if (!answer) throw new Refusal(404, 'there is no such page');
    const run = this.#find(name);
    const { state, detail } = this.#runs.row(run);
    if (state === 'broken' && what !== 'overview') throw new Refusal(422, detail);
    const value = await answer(run, { query: url.searchParams, rest, response });
    if (value !== undefined) sendJson(response, value);
  }

  /** On an address that others can reach, every request needs the token; `/?token=…` stores it in a cookie. */
  #login(request: IncomingMessage, response: ServerResponse, url: URL): boolean {
    if (hasTokenHeader(request, this.#token) || hasTokenCookie(request, this.#token)) return true;
    const given = url.searchParams.get('token');
    if (url.pathname !== '/' || given === null || !isEqual(given, this.#token))
      throw new Refusal(401, 'open the address with ?token=… that the dashboard printed at its start');
    response.writeHead(303, { 'Set-Cookie': tokenCookie(this.#token), Location: '/' }).end();
    return false;
  }

  #asset(path: string, response: ServerResponse): void {
    const asset = this.#assets.get(path);
    if (!asset) throw new Refusal(404, 'there is no such page');
    response.writeHead(200, asset.headers).end(asset.content);
  }

  #find(name: string | undefined): FoundRun {
    const run = this.#runs.find(name ?? '');
    if (!run) throw new Refusal(404, 'there is no such run');
    return run;
  }

  async #table(): Promise<Table> {
    const runs = await this.#runs.rows();
    return { dir: this.#options.dir, version: trefoilVersion(), runs };
  }

  readonly #answers: Readonly<Record<string, Answer>> = {
    overview: (run) => readOverview(this.#runs, run, READ_MS),
    columns: (run, asked) => this.#columns(run, asked),
    attention: async ({ dir }) => ({
      records: await readRecords(runPaths(dir).attention),
      needle: readJson(join(dir, 'needle.json')),
    }),
    samples: async ({ dir }) => ({ samples: await readRecords(runPaths(dir).samples) }),
    trace: (run, { rest }) => this.#trace(run, rest),
  };

  async #columns(run: FoundRun, { query, response }: Asked): Promise<void> {
    const kind = query.get('log') ?? 'heartbeat';
    const rank = Number(query.get('rank') ?? 0);
    if (!LOG_KINDS.has(kind) || !Number.isSafeInteger(rank) || rank < 0) throw new Refusal(400, 'log or rank is wrong');
    const log = this.#runs.log(run, kind as LogKind, rank);
    await log.catchUp(READ_MS);
    const bytes = encodeChartData(log.chartData(numberOf(query, 'from'), numberOf(query, 'to')));
    response.writeHead(200, { 'Content-Type': 'application/octet-stream', 'Content-Length': bytes.length });
    response.end(bytes);
  }

  #stream(request: IncomingMessage, query: Query, response: ServerResponse): void {
    if (this.#streams >= MOST_STREAMS) throw new Refusal(503, 'too many streams; close some pages');
    this.#streams += 1;
    response.once('close', () => {
      this.#streams -= 1;
    });
    const names = query.getAll('run');
    if (names.length === 0) {
      streamTable(response, this.#runs);
      return;
    }
    const runs = names.map((name) => this.#find(name));
    const given = query.getAll('rank').map(Number);
    const ranks = names.map((_, i) => given[i] ?? 0);
    if (!ranks.every((rank) => Number.isSafeInteger(rank) && rank >= 0)) throw new Refusal(400, 'rank is wrong');
    const last = request.headers['last-event-id'];
    const offsets =
      parseOffsets(typeof last === 'string' ? last : undefined, runs.length) ??
      parseOffsets(query.get('from') ?? undefined, runs.length);
    if (!offsets) throw new Refusal(400, 'from must hold an offset for each run');
    streamRows(
      response,
      runs.map(({ dir }, i) => ({ path: runPaths(dir).heartbeat(ranks[i]), offset: offsets[i] })),
    );
  }

  /** `trace/NAME`, `trace/NAME/token/I` or `trace/NAME/block/B`. */
  #trace(run: FoundRun, [name, ...rest]: readonly string[]): unknown {
    if (!listTraces(run.dir).includes(name)) throw new Refusal(404, 'there is no such trace');
    const file = new TraceFile(join(run.dir, 'traces', `${name}.safetensors`));
    try {
      const answer = file.answer(rest);
      if (answer === undefined) throw new Refusal(404, 'there is no such page');
      return answer;
    } finally {
      file.close();
    }
  }

  async #write(request: IncomingMessage, [, kind, name, action]: string[]): Promise<Control> {
    if (request.method !== 'POST') throw new Refusal(405, 'only GET and POST');
    if (kind !== 'runs' || (action !== 'halt' && action !== 'save')) throw new Refusal(404, 'there is no such page');
    if (!hasTokenHeader(request, this.#token))
      throw new Refusal(403, 'the token is missing or wrong; it was printed when the dashboard started');
    const run = this.#find(name);
    const body = await readBody(request);
    return action === 'halt' ? await requestHalt(run.dir, reasonIn(body)) : requestSave(run.dir);
  }
}

/** A page of another site may send requests here, though it cannot read the answers: the model would compute for it. */
function expectOwnOrigin({ headers: { origin, host } }: IncomingMessage): void {
  if (origin === undefined || origin === `http://${host}` || origin === `https://${host}`) return;
  throw new Refusal(403, 'requests from pages of other sites are refused');
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch (error) {
    if (!(error instanceof URIError)) throw error;
    throw new Refusal(400, 'the address is not valid');
  }
}

function numberOf(query: Query, name: string): number | undefined {
  const text = query.get(name);
  if (text === null) return undefined;
  const value = Number(text);
  if (!Number.isFinite(value)) throw new Refusal(400, `${name} is not a number`);
  return value;
}

function readBody(request: IncomingMessage): Promise<string> {
  return new Promise((resolve, reject) => {
    let text = '';
    request.setEncoding('utf8');
    request.on('data', (piece: string) => {
      text += piece;
      if (text.length > BODY_BYTES) {
        reject(new Refusal(413, 'the request is too long'));
        request.removeAllListeners('data').resume();
      }
    });
    request.on('end', () => resolve(text));
    request.on('error', reject);
  });
}

function reasonIn(body: string): string {
  if (body === '') return 'from the dashboard';
  let parsed: unknown;
  try {
    parsed = JSON.parse(body);
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    throw new Refusal(400, 'the request is not JSON');
  }
  const reason = (parsed as { reason?: unknown } | null)?.reason;
  return typeof reason === 'string' && reason.trim() !== '' ? reason.slice(0, 200) : 'from the dashboard';
}

function sendJson(response: ServerResponse, value: unknown, status = 200): void {
  const text = toJson(value);
  response.writeHead(status, { 'Content-Type': 'application/json; charset=utf-8' });
  response.end(text);
}

function parseUrl(path = '/'): URL {
  try {
    return new URL(path, 'http://dashboard');
  } catch {
    throw new Refusal(400, 'the path is not valid');
  }
}
