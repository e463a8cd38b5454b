/** The HTTP server of the dashboard: pages, run data, streams, and the two writes (halt and save). */
import type { IncomingMessage, ServerResponse } from 'node:http';
import { join } from 'node:path';
import { TrefoilError } from '../errors.js';
import { TraceFile } from '../evaluate/trace-file.js';
import { bearerKey, isLoopback, Keys } from '../http/access.js';
import { sendError, sendJson } from '../http/answer.js';
import { readBody } from '../http/body.js';
import { asHttpError, HttpError } from '../http/error.js';
import { listen } from '../http/listen.js';
import { addressOf, Router } from '../http/router.js';
import { toJson } from '../run/json.js';
import { runPaths } from '../run/paths.js';
import { trefoilVersion } from '../run/version.js';
import type { ModelHost } from '../serve/host.js';
import { type MountedModel, mountModel } from '../serve/server.js';
import type { Thresholds } from '../watch/thresholds.js';
import type { Table } from './answers.js';
import { loadAssets } from './assets.js';
import { type ChartData, encodeChartData, LOG_COLUMNS, type LogName } from './chart-data.js';
import { type Control, requestHalt, requestSave } from './control.js';
import { namedMetrics } from './named-metrics.js';
import { readOverview } from './overview.js';
import { listTraces, readJson, readRecords } from './run-files.js';
import { type FoundRun, Runs } from './runs.js';
import { HEADERS, hasTokenCookie, isOwnHost, newToken, tokenCookie } from './security.js';
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

const MAX_BODY = 4096;
const MAX_STREAMS = 64;
/** Runs of one stream, and of all: their files are looked at ten times a second. The pages compare six runs. */
const MAX_FOLLOWED = 32;
const MAX_FOLLOWED_BY_ALL = 256;
const UNNAMED_REASON = 'from the dashboard';
/** A request waits this long for a log that is being read, then gets what is there. */
const READ_MS = 400;

/** The paths that belong to the model. */
const MODEL_PATH = /^\/(v1|reader)(\/|$)/;

export async function startDashboard(options: DashboardOptions): Promise<Dashboard> {
  const token = options.token ?? newToken();
  const handler = new DashboardServer(options, token);
  const { server, url } = await listen(
    (request, response) => void handler.answer(request, response),
    options.host,
    options.port,
  );
  const close = () =>
    new Promise<void>((resolve) => {
      handler.close();
      server.close(() => resolve());
      server.closeAllConnections();
    });
  return { url, token, close };
}

type Query = URLSearchParams;

/** A request whose route was found. */
interface Asked {
  readonly request: IncomingMessage;
  readonly response: ServerResponse;
  readonly query: Query;
  /** The open parts of the path; after the run's name in an answer about a run. */
  readonly params: readonly string[];
}

/** Returns the value of a JSON answer; undefined if the answer was sent already. */
type Handler = (asked: Asked) => unknown;

/** A handler that is about a run. */
type RunHandler = (run: FoundRun, asked: Asked) => unknown;

class DashboardServer {
  readonly #runs: Runs;
  readonly #options: DashboardOptions;
  readonly #token: Keys;
  readonly #model: MountedModel | null;
  readonly #routes: Router<Handler>;
  #streams = 0;
  #followed = 0;

  constructor(options: DashboardOptions, token: string) {
    this.#runs = new Runs(options.dir, options.thresholds);
    this.#options = options;
    this.#token = new Keys([token]);
    this.#model = options.model ? mountModel(options.model.host, { id: options.model.id }) : null;
    const pages = [...loadAssets(options.model ? ['runs', 'model'] : ['runs'])];
    this.#routes = new Router<Handler>({
      ...Object.fromEntries(
        pages.map(([path, { headers, content }]) => [
          `GET ${path}`,
          ({ response }: Asked) => void response.writeHead(200, headers).end(content),
        ]),
      ),
      'GET /api/runs': () => this.#table(),
      'GET /api/stream': (asked) => this.#stream(asked),
      'GET /api/runs/:run': this.#about((run) => readOverview(this.#runs, run, READ_MS)),
      'GET /api/runs/:run/columns': this.#aboutSound((run, asked) => this.#columns(run, asked)),
      'GET /api/runs/:run/attention': this.#aboutSound(async ({ dir }) => ({
        records: await readRecords(runPaths(dir).attention),
        needle: readJson(join(dir, 'needle.json')),
      })),
      'GET /api/runs/:run/samples': this.#aboutSound(async ({ dir }) => ({
        samples: await readRecords(runPaths(dir).samples),
      })),
      'GET /api/runs/:run/trace/*': this.#aboutSound((run, { params }) => readTrace(run, params)),
      'POST /api/runs/:run/halt': this.#control(async (run, { request }) =>
        requestHalt(run.dir, await readReason(request)),
      ),
      'POST /api/runs/:run/save': this.#control((run) => requestSave(run.dir)),
    });
  }

  close(): void {
    this.#model?.close();
  }

  async answer(request: IncomingMessage, response: ServerResponse): Promise<void> {
    for (const [name, value] of Object.entries(HEADERS)) response.setHeader(name, value);
    try {
      await this.#route(request, response);
    } catch (error) {
      const isExpected = error instanceof TrefoilError;
      const shown = isExpected ? new HttpError(422, this.#runs.hidePaths(error.message)) : asHttpError(error);
      sendError(request, response, shown, { error: shown.message });
    }
  }

  async #route(request: IncomingMessage, response: ServerResponse): Promise<void> {
    if (!isOwnHost(request.headers.host, this.#options.host))
      throw new HttpError(421, 'the Host header does not name this server');
    const { path, query } = addressOf(request);
    if (!isLoopback(this.#options.host) && !this.#isKnown(request)) {
      this.#login(response, path, query);
      return;
    }
    if (request.method !== 'GET' && request.method !== 'HEAD') expectOwnOrigin(request);
    if (this.#model && MODEL_PATH.test(path)) return this.#model.answer(request, response);
    const { handler, params } = this.#routes.find(request.method, path);
    const value = await handler({ request, response, query, params });
    if (value !== undefined) sendJson(response, toJson(value));
  }

  #isKnown(request: IncomingMessage): boolean {
    return this.#token.has(bearerKey(request)) || hasTokenCookie(request, this.#token);
  }

  /** On an address that others can reach, every request needs the token; `/?token=…` stores it in a cookie. */
  #login(response: ServerResponse, path: string, query: Query): void {
    const given = query.get('token') ?? '';
    if (path !== '/' || !this.#token.has(given))
      throw new HttpError(401, 'open the address with ?token=… that the dashboard printed at its start');
    response.writeHead(303, { 'Set-Cookie': tokenCookie(given), Location: '/' }).end();
  }

  #find(name: string): FoundRun {
    const run = this.#runs.find(name);
    if (!run) throw new HttpError(404, 'there is no such run');
    return run;
  }

  #about(answer: RunHandler): Handler {
    return ({ params: [name, ...params], ...asked }) => answer(this.#find(name), { ...asked, params });
  }

  #aboutSound(answer: RunHandler): Handler {
    return this.#about((run, asked) => {
      const { state, detail } = this.#runs.row(run);
      if (state === 'broken') throw new HttpError(422, detail);
      return answer(run, asked);
    });
  }

  #control(act: (run: FoundRun, asked: Asked) => Control | Promise<Control>): Handler {
    return (asked) => {
      if (!this.#token.has(bearerKey(asked.request)))
        throw new HttpError(403, 'the token is missing or wrong; it was printed when the dashboard started');
      return this.#about(act)(asked);
    };
  }

  async #table(): Promise<Table> {
    const runs = await this.#runs.rows();
    return { dir: this.#options.dir, version: trefoilVersion(), runs };
  }

  async #columns(run: FoundRun, { query, response }: Asked): Promise<void> {
    const kind = query.get('log') ?? 'heartbeat';
    const rank = Number(query.get('rank') ?? 0);
    if (kind === 'own') return sendChart(response, namedMetrics(runPaths(run.dir).ownMetrics));
    if (kind === 'source') return sendChart(response, namedMetrics(runPaths(run.dir).sourceMetrics));
    if (!Object.hasOwn(LOG_COLUMNS, kind) || !Number.isSafeInteger(rank) || rank < 0)
      throw new HttpError(400, 'log or rank is wrong');
    const log = this.#runs.log(run, kind as LogName, rank);
    await log.catchUp(READ_MS);
    sendChart(response, log.chartData(numberOf(query, 'from'), numberOf(query, 'to')));
  }

  #stream({ request, query, response }: Asked): void {
    const names = query.getAll('run');
    if (names.length > MAX_FOLLOWED) throw new HttpError(400, `a stream has at most ${MAX_FOLLOWED} runs`);
    if (this.#streams >= MAX_STREAMS || this.#followed + names.length > MAX_FOLLOWED_BY_ALL)
      throw new HttpError(503, 'too many streams; close some pages');
    this.#streams += 1;
    this.#followed += names.length;
    response.once('close', () => {
      this.#streams -= 1;
      this.#followed -= names.length;
    });
    if (names.length === 0) {
      streamTable(response, this.#runs);
      return;
    }
    const runs = names.map((name) => this.#find(name));
    const given = query.getAll('rank').map(Number);
    const ranks = names.map((_, i) => given[i] ?? 0);
    if (!ranks.every((rank) => Number.isSafeInteger(rank) && rank >= 0)) throw new HttpError(400, 'rank is wrong');
    const last = request.headers['last-event-id'];
    const offsets =
      parseOffsets(typeof last === 'string' ? last : undefined, runs.length) ??
      parseOffsets(query.get('from') ?? undefined, runs.length);
    if (!offsets) throw new HttpError(400, 'from must hold an offset for each run');
    streamRows(
      response,
      runs.map(({ dir }, i) => ({ path: runPaths(dir).heartbeat(ranks[i]), offset: offsets[i] })),
    );
  }
}

function sendChart(response: ServerResponse, data: ChartData): void {
  const bytes = encodeChartData(data);
  response.writeHead(200, { 'Content-Type': 'application/octet-stream', 'Content-Length': bytes.length });
  response.end(bytes);
}

/** Answers `NAME`, `NAME/token/I` and `NAME/block/B`. */
function readTrace({ dir }: FoundRun, [name, ...rest]: readonly string[]): object {
  if (!listTraces(dir).includes(name)) throw new HttpError(404, 'there is no such trace');
  const file = new TraceFile(join(dir, 'traces', `${name}.safetensors`));
  try {
    const answer = file.answer(rest);
    if (answer === undefined) throw new HttpError(404, 'there is no such page');
    return answer;
  } finally {
    file.close();
  }
}

/** A page of another site may send requests here, though it cannot read the answers: the model would compute for it. */
function expectOwnOrigin({ headers: { origin, host } }: IncomingMessage): void {
  if (origin === undefined || origin === `http://${host}` || origin === `https://${host}`) return;
  throw new HttpError(403, 'requests from pages of other sites are refused');
}

function numberOf(query: Query, name: string): number | undefined {
  const text = query.get(name);
  if (text === null) return undefined;
  const value = Number(text);
  if (!Number.isFinite(value)) throw new HttpError(400, `${name} is not a number`);
  return value;
}

/** The field `reason` of the body. */
async function readReason(request: IncomingMessage): Promise<string> {
  const body = await readBody(request, MAX_BODY);
  if (body.length === 0) return UNNAMED_REASON;
  let parsed: unknown;
  try {
    parsed = JSON.parse(body.toString());
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    throw new HttpError(400, 'the request is not JSON');
  }
  const reason = (parsed as { reason?: unknown } | null)?.reason;
  return typeof reason === 'string' && reason.trim() !== '' ? reason.slice(0, 200) : UNNAMED_REASON;
}
