/**
 * Downloads from the hub that either complete or fail: a dropped, stalled, truncated or refused response is requested again from
 * the byte where it ended, with exponential back-off, until no byte has arrived within the time limit.
 */

import { setTimeout as sleep } from 'node:timers/promises';
import { ExitCode, TrefoilError, UsageError } from '../errors.js';
import { plural } from '../text.js';

export interface HttpOptions {
  /** Sent as a bearer token to this origin and to no other; never part of a message. */
  readonly credential?: { readonly origin: string; readonly token: string } | undefined;
  /** Time without a byte, over all attempts, after which the download fails. */
  readonly giveUpAfterMs: number;
  /** Time without a byte after which one attempt is aborted. */
  readonly stallMs: number;
  /** Pause before the second attempt; it doubles for each further one. */
  readonly firstPauseMs: number;
  /** When a small document must be there, however steadily its bytes arrive (`performance.now()`). */
  readonly deadline?: number;
  /** How the user gives the hub more time, for messages about time limits. */
  readonly moreTime?: string;
  /** Ends all requests. */
  readonly signal?: AbortSignal;
}

/** A listing and its pages have this many times the time without a byte. */
const TOTAL_FACTOR = 5;
/** A slower download would hold a run for ever, byte by byte. */
const MIN_BYTES_PER_SECOND = 1024;

/** The same options for requests that all together must be answered within a total time. */
export function withDeadline(options: HttpOptions): HttpOptions {
  return { ...options, deadline: performance.now() + TOTAL_FACTOR * options.giveUpAfterMs };
}

export interface ByteRange {
  readonly start: number;
  /** Not included. */
  readonly end: number;
  /** Size of the whole file, if known. A response with another size is an error: the file was replaced. */
  readonly size?: number | undefined;
}

const LONGEST_PAUSE_MS = 20_000;
const JSON_LIMIT = 64 << 20;

const TRY_LATER = 'try again later';

/** The source failed for good. A run saves a checkpoint and ends with its own exit code. */
export class SourceGaveUp extends TrefoilError {
  constructor(message: string, options?: ErrorOptions) {
    super(message, ExitCode.dataSource, options);
  }
}

/** HTTP 401 or 403. */
export class AccessRefused extends UsageError {
  readonly status: number;

  constructor(where: string, status: number) {
    super(`${where}: access refused (HTTP ${status}); set HF_TOKEN to a token that may read it`);
    this.status = status;
  }
}

/** An error that is worth another attempt. */
class Transient extends Error {
  readonly pauseMs: number | undefined;

  constructor(message: string, pauseMs?: number) {
    super(message);
    this.pauseMs = pauseMs;
  }
}

/** Host and path only: a query may hold a signature, and the part before the host a password. */
export function describeUrl(url: string): string {
  const { host, pathname } = new URL(url);
  return `${host}${pathname}`;
}

/** The bytes [start, end) of a file. */
export async function fetchRange(url: string, range: ByteRange, options: HttpOptions): Promise<Uint8Array> {
  const bytes = new Uint8Array(range.end - range.start);
  await fetchPieces(url, range, options, (piece, at) => bytes.set(piece, at - range.start));
  return bytes;
}

/** Calls `take` with the bytes [start, end) of a file, in order, each once, with their position in the file. */
export async function fetchPieces(
  url: string,
  range: ByteRange,
  options: HttpOptions,
  take: (piece: Uint8Array, at: number) => void | Promise<void>,
): Promise<void> {
  const length = range.end - range.start;
  let received = 0;
  const started = performance.now();
  await untilDone(url, options, async (progress) => {
    if (received === length) return;
    const from = range.start + received;
    const response = await request(url, options, { range: `bytes=${from}-${range.end - 1}` });
    let surplus = bytesBefore(url, response, from, range);
    for await (const chunk of body(response, options.stallMs)) {
      const part = chunk.subarray(surplus).subarray(0, length - received);
      surplus = Math.max(0, surplus - chunk.length);
      await take(part, range.start + received);
      received += part.length;
      const allowed = TOTAL_FACTOR * options.giveUpAfterMs + (1000 * received) / MIN_BYTES_PER_SECOND;
      if (performance.now() - started > allowed)
        throw new SourceGaveUp(
          `${describeUrl(url)} gives less than ${MIN_BYTES_PER_SECOND} bytes per second; use another mirror`,
        );
      if (part.length > 0) progress();
      if (received === length) return; // ignores surplus bytes
    }
    throw new Transient(`the answer ended after ${received} of ${length} bytes`);
  });
}

/** A whole small document. Undefined for HTTP 404. */
export async function fetchSmall(
  url: string,
  options: HttpOptions,
): Promise<{ text: string; headers: Headers } | undefined> {
  let found: { text: string; headers: Headers } | undefined;
  const { deadline = withDeadline(options).deadline! } = options;
  if (performance.now() > deadline) throw tooSlow(url, options);
  await untilDone(url, options, async () => {
    const response = await request(url, options, {});
    if (response.status === 404) return;
    checkStatus(url, response);
    const chunks: Uint8Array[] = [];
    let length = 0;
    for await (const chunk of body(response, options.stallMs)) {
      chunks.push(chunk);
      length += chunk.length;
      if (performance.now() > deadline) throw tooSlow(url, options);
      if (length > JSON_LIMIT) throw new SourceGaveUp(`${describeUrl(url)}: an answer of more than 64 MiB; refused`);
    }
    // fetch does not detect every truncated body behind a proxy.
    const expected = response.headers.get('content-length');
    const encoded = response.headers.get('content-encoding') !== null;
    if (expected !== null && !encoded && Number(expected) !== length)
      throw new Transient(`the answer has ${length} bytes, not ${expected}`);
    found = { text: Buffer.concat(chunks).toString('utf8'), headers: response.headers };
  });
  return found;
}

function tooSlow(url: string, { giveUpAfterMs, moreTime = TRY_LATER }: HttpOptions): SourceGaveUp {
  const seconds = ((TOTAL_FACTOR * giveUpAfterMs) / 1000).toFixed(0);
  return new SourceGaveUp(
    `${describeUrl(url)}: its listing is not complete after ${seconds} s; use another mirror, or ${moreTime}`,
  );
}

/** The size of a file, for listings without sizes. */
export async function fetchSize(url: string, options: HttpOptions): Promise<number> {
  let size = Number.NaN;
  await untilDone(url, options, async () => {
    const response = await request(url, options, { range: 'bytes=0-0' });
    checkStatus(url, response);
    await response.body?.cancel();
    const total = /\/(\d+)$/.exec(response.headers.get('content-range') ?? '')?.[1];
    if (response.status !== 206 || total === undefined) throw noRanges(url);
    size = Number(total);
  });
  return size;
}

/** Runs attempts until one succeeds or the time limit without progress has passed. */
async function untilDone(
  url: string,
  options: HttpOptions,
  attempt: (progress: () => void) => Promise<void>,
): Promise<void> {
  let lastProgress = performance.now();
  let failures = 0;
  const progress = (): void => {
    lastProgress = performance.now();
    failures = 0;
  };
  for (;;) {
    try {
      return await attempt(progress);
    } catch (error) {
      options.signal?.throwIfAborted();
      const reason = transientReason(error);
      if (reason === undefined) throw error;
      failures++;
      const left = options.giveUpAfterMs - (performance.now() - lastProgress);
      // Jitter, so that ranks that failed together do not retry together.
      const growing =
        Math.min(LONGEST_PAUSE_MS, options.firstPauseMs * 2 ** (failures - 1)) * (0.5 + 0.5 * Math.random());
      const pause = Math.max(growing, (error as Transient).pauseMs ?? 0);
      if (left <= 0) {
        const seconds = (options.giveUpAfterMs / 1000).toFixed(0);
        throw new SourceGaveUp(
          `${describeUrl(url)} gave nothing for ${seconds} s (${plural(failures, 'attempt')}; the last: ${reason}); ` +
            `check the network and HF_ENDPOINT, or ${options.moreTime ?? TRY_LATER}`,
        );
      }
      await sleep(Math.min(pause, left), undefined, options.signal ? { signal: options.signal } : {});
    }
  }
}

/** Describes an error that is worth another attempt; undefined for all others. */
function transientReason(error: unknown): string | undefined {
  if (error instanceof Transient) return error.message;
  if (error instanceof TrefoilError || !(error instanceof Error)) return undefined;
  if (error.name === 'AbortError' || error.name === 'TimeoutError') return 'no answer in time';
  // fetch wraps network errors in a TypeError whose cause has the code. Messages are not repeated: they contain URLs.
  const { code } = (error.cause ?? error) as NodeJS.ErrnoException;
  if (error instanceof TypeError && (error.cause !== undefined || error.message === 'terminated'))
    return code ?? 'connection lost';
  return undefined;
}

async function request(url: string, options: HttpOptions, headers: Record<string, string>): Promise<Response> {
  const { credential, signal } = options;
  const mayKnow = credential !== undefined && new URL(url).origin === credential.origin;
  const authorization = mayKnow ? { authorization: `Bearer ${credential.token}` } : {};
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort(), options.stallMs);
  try {
    // fetch drops the authorization header when a redirect leads to another origin.
    const ended = signal === undefined ? abort.signal : AbortSignal.any([abort.signal, signal]);
    return await fetch(url, { headers: { ...headers, ...authorization }, signal: ended });
  } finally {
    clearTimeout(timer);
  }
}

/** The chunks of a response. Throws after `stallMs` without a byte. */
async function* body(response: Response, stallMs: number): AsyncGenerator<Uint8Array> {
  if (response.body === null) return;
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await withLimit(reader.read(), stallMs);
      if (done) return;
      yield value;
    }
  } finally {
    // Also runs when the consumer stops early. An error while closing is ignored.
    reader.cancel().catch(() => {});
  }
}

async function withLimit<Value>(promise: Promise<Value>, ms: number): Promise<Value> {
  let timer: NodeJS.Timeout | undefined;
  const limit = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Transient(`no byte for ${(ms / 1000).toFixed(0)} s`)), ms);
  });
  try {
    return await Promise.race([promise, limit]);
  } finally {
    clearTimeout(timer);
  }
}

function checkStatus(url: string, response: Response): void {
  const { status } = response;
  if (status === 200 || status === 206) return;
  response.body?.cancel().catch(() => {}); // the body is not needed; an error while closing is ignored
  if (status === 429 || status === 408 || status >= 500)
    throw new Transient(`HTTP status ${status}`, retryAfter(response.headers.get('retry-after')));
  const where = describeUrl(url);
  if (status === 401 || status === 403) throw new AccessRefused(where, status);
  if (status === 404) throw new UsageError(`${where}: there is no such file (HTTP 404); check its name`);
  throw new SourceGaveUp(`${where}: HTTP status ${status}`);
}

/** Checks the answer to a request for the bytes from `from` on; returns how many bytes before them it begins with. */
function bytesBefore(url: string, response: Response, from: number, range: ByteRange): number {
  checkStatus(url, response);
  if (response.status !== 206) {
    const whole = response.headers.get('content-length');
    // A server may answer a request for the whole file, or for its end, with status 200 and the whole file.
    if (range.end === range.size && Number(whole) === range.size) return from;
    throw noRanges(url);
  }
  const answer = /^bytes (\d+)-\d+\/(\d+|\*)$/.exec(response.headers.get('content-range') ?? '');
  if (answer === null || Number(answer[1]) !== from)
    throw new Transient('the answer is about other bytes than asked for');
  if (range.size !== undefined && answer[2] !== '*' && Number(answer[2]) !== range.size) {
    throw new SourceGaveUp(
      `${describeUrl(url)} has ${answer[2]} bytes now, not ${range.size} as listed: it was replaced; start again`,
    );
  }
  return 0;
}

function noRanges(url: string): SourceGaveUp {
  return new SourceGaveUp(`${describeUrl(url)}: the server does not answer range requests; use another mirror`);
}

/** Seconds or a date. */
function retryAfter(header: string | null): number | undefined {
  if (header === null) return undefined;
  const ms = /^\d+$/.test(header.trim()) ? Number(header) * 1000 : Date.parse(header) - Date.now();
  return Number.isFinite(ms) ? Math.max(0, ms) : undefined;
}
