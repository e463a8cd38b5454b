/**
 * The signs of life of a rank, for people, watchdogs and dashboards. heartbeat_rank{r}.jsonl has a line per step with the
 * state of the run. .section_rank{r} names what the rank is doing at this moment, which a heartbeat cannot: it is written
 * after the step. Both are written by log.ts.
 */

import { constants, openSync } from 'node:fs';
import { UsageError } from '../../errors.js';
import { fileError, parseObject, readFully, readText, statOrUndefined, withFile } from '../../files.js';
import { asNumber } from '../json.js';
import { COUNTERS, METRIC_ENTRIES, METRICS, type NamedMetric, type RunMetrics } from '../metrics.js';

/** Kinds of heartbeat records. */
export type HeartbeatMessage =
  | 'boot'
  | 'loader_ready'
  | 'loader_error'
  | 'progress'
  | 'checkpoint'
  | 'eval'
  | 'halt'
  | 'stop';

/** How a run ended, in its last heartbeat and in metrics.json. */
export type EndStatus = (typeof END_STATUSES)[number];
const END_STATUSES = [
  'done',
  'halted',
  'signalled',
  'non-finite',
  'no-data',
  'ranks-differ',
  'out-of-memory',
  'failed',
] as const;

const COUNTER_PREFIX = METRICS.counters.named.prefix;

/** The metrics in a heartbeat, by name, and a field for each counter, metric of the program's own, and source. */
export type HeartbeatMetrics = {
  [Name in Exclude<keyof RunMetrics, NamedMetric> as (typeof METRICS)[Name] extends { readonly heartbeat: false }
    ? never
    : Name]?: NonNullable<RunMetrics[Name]>;
} & { [named: `${(typeof METRICS)[NamedMetric]['named']['prefix']}${string}`]: number };

/** Fields that a rank reports. */
export type HeartbeatFields = HeartbeatMetrics & {
  step: number;
  msg: HeartbeatMessage;
  /** An evaluation has these and no `loss`, so that a query for training losses finds those alone. */
  val_loss?: number;
  ppl?: number;
  /** The source the batch came from: `synthetic` whenever it is not the one that was asked for. */
  data?: string;
  /** Name of the section that the rank was about to run, so that a watchdog can name where it hangs. */
  section?: string;
  /** The reason behind a loader_error, halt or stop. */
  detail?: string;
  /** In the last heartbeat of a process: how it ended. */
  status?: EndStatus;
  /** Its exit code. */
  exit_code?: number;
};

/** Metrics as fields of a heartbeat, in the order of the table. */
export function heartbeatMetrics(metrics: RunMetrics): HeartbeatMetrics {
  const fields = METRIC_ENTRIES.flatMap(([name, { heartbeat, named }]): (readonly [string, unknown])[] => {
    const value = metrics[name];
    if (value === undefined || heartbeat === false) return [];
    if (!named) return [[name, value]];
    return Object.entries(value).map(([one, number]) => [named.prefix + one, number]);
  });
  return Object.fromEntries(fields) as HeartbeatMetrics;
}

/** The counters of a heartbeat, by their names in the table. */
export function countersIn(beat: HeartbeatMetrics): [name: string, count: number][] {
  return Object.entries(beat).flatMap(([field, count]): [string, number][] =>
    field.startsWith(COUNTER_PREFIX) ? [[field.slice(COUNTER_PREFIX.length), count as number]] : [],
  );
}

/** The counters of a heartbeat that should stay near 0. */
export function failureCounters(beat: HeartbeatMetrics): [name: string, count: number][] {
  return countersIn(beat).filter(([name]) => !COUNTERS[name]?.isUsual);
}

/** The part of a line with the counters, which stand together; undefined if it has none. */
export function counterText(line: string): string | undefined {
  const begin = line.indexOf(`"${COUNTER_PREFIX}`);
  if (begin < 0) return undefined;
  const end = line.indexOf(',', line.lastIndexOf(`"${COUNTER_PREFIX}`));
  return line.slice(begin, end < 0 ? undefined : end);
}

/** A line of the file. */
export type Heartbeat = HeartbeatFields & {
  /** Seconds since 1970, with fraction. */
  ts: number;
  iso: string;
  pid: number;
  rank: number;
  /** How many ranks the run has; absent in files of earlier versions. */
  world?: number;
};

const TEXT_FIELDS = new Set(['iso', 'msg', 'data', 'section', 'detail', 'status']);
/** Metrics that are lists of numbers. */
const LISTS = new Set<string>(METRIC_ENTRIES.flatMap(([name, { parts }]) => (parts ? name : [])));
/** Reasons are one line. */
const MAX_TEXT = 1000;
/** The trainer has some dozen fields. */
const MAX_FIELDS = 500;
/** Lines in a row that are no heartbeats, after which the end of a file holds none. */
const MAX_GARBAGE = 10_000;
/** More ranks than any run has: readers make lists of this length. */
const MAX_RANKS = 65_536;
const REQUIRED_NUMBERS = ['ts', 'pid', 'rank', 'step'];
/** The end of the file is read in windows that grow until they hold enough lines; the largest window is the limit. */
const WINDOW_BYTES = [64 * 1024, 1024 * 1024, 16 * 1024 * 1024];
const CHUNK_BYTES = 1024 * 1024;
const NEWLINE = 0x0a;
/** Shorter lines lack a required field; a file of garbage has millions of them. */
export const MIN_LINE_BYTES = 40;

/**
 * The last `count` heartbeats, oldest first. Reads only the end of the file, however long it is. A missing file has none;
 * a line still being written, garbage, and bytes that vanish while they are read are passed over.
 */
export function tailHeartbeats(path: string, count: number): Heartbeat[] {
  let found: Heartbeat[] = [];
  withFile(path, (descriptor, size) => {
    for (const bytes of WINDOW_BYTES) {
      const start = Math.max(0, size - bytes);
      const content = Buffer.alloc(size - start);
      const read = readFully(descriptor, content, start);
      found = lastRecords(content.subarray(0, read), count);
      if (found.length >= count || start === 0) break;
    }
  });
  return found;
}

/** All heartbeats, oldest first, one at a time: the file may be larger than memory. */
export function* readHeartbeats(path: string): Generator<Heartbeat> {
  let position = 0;
  let rest: Uint8Array = new Uint8Array(0);
  const decoder = new TextDecoder();
  for (;;) {
    // Opened anew for each piece: a reader that stops half way leaves nothing open.
    const chunk = withFile(path, (descriptor) => {
      const target = new Uint8Array(CHUNK_BYTES);
      return target.subarray(0, readFully(descriptor, target, position));
    });
    if (!chunk?.length) return;
    position += chunk.length;
    // A line longer than a whole chunk is no heartbeat: forget its beginning instead of collecting it.
    const content = rest.length > CHUNK_BYTES ? chunk : Buffer.concat([rest, chunk]);
    const end = content.lastIndexOf(NEWLINE) + 1;
    for (let start = 0; start < end; ) {
      const stop = content.indexOf(NEWLINE, start);
      const isLong = stop - start >= MIN_LINE_BYTES;
      const heartbeat = isLong ? parseHeartbeat(decoder.decode(content.subarray(start, stop))) : undefined;
      if (heartbeat) yield heartbeat;
      start = stop + 1;
    }
    rest = content.subarray(end);
  }
}

/** Reads a line; undefined when it is no heartbeat. Optional fields of a wrong kind are left out. */
export function parseHeartbeat(line: string): Heartbeat | undefined {
  if (!line.includes('"msg"')) return undefined; // parsing a file of garbage takes ten times as long
  const parsed = parseObject(line);
  if (typeof parsed?.['msg'] !== 'string') return undefined;
  if (!REQUIRED_NUMBERS.every((name) => Number.isFinite(parsed[name]))) return undefined;
  const heartbeat: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(parsed).slice(0, MAX_FIELDS)) {
    const kept = parseField(name, value);
    if (kept !== undefined) heartbeat[name] = kept;
  }
  return heartbeat as unknown as Heartbeat;
}

function parseField(name: string, value: unknown): number | string | number[] | undefined {
  if (name === 'status') return END_STATUSES.find((status) => status === value);
  if (TEXT_FIELDS.has(name)) return typeof value === 'string' ? value.slice(0, MAX_TEXT) : undefined;
  if (name === 'world') return isRankCount(value) ? value : undefined;
  if (!LISTS.has(name)) return asNumber(value);
  const numbers = Array.isArray(value) ? value.map(asNumber) : [undefined];
  return numbers.every((one) => one !== undefined) ? numbers : undefined;
}

function isRankCount(value: unknown): value is number {
  return Number.isSafeInteger(value) && (value as number) >= 1 && (value as number) <= MAX_RANKS;
}

/** The window mostly begins inside a line; the rest of a line is no JSON object and goes the way of all garbage. */
function lastRecords(content: Buffer, count: number): Heartbeat[] {
  const found: Heartbeat[] = [];
  let end = content.lastIndexOf(NEWLINE);
  for (let garbage = 0; end >= 0 && found.length < count && garbage < MAX_GARBAGE; ) {
    const start = end === 0 ? -1 : content.lastIndexOf(NEWLINE, end - 1);
    const heartbeat = parseHeartbeat(content.toString('utf8', start + 1, end));
    if (heartbeat) found.push(heartbeat);
    garbage = heartbeat ? 0 : garbage + 1;
    end = start;
  }
  return found.reverse();
}

/** The sections of a run. In `between`, signals and .HALT are checked; in `wait`, the rank waits for other ranks. */
export type SectionName = 'boot' | 'fetch' | 'step' | 'save' | 'eval' | 'sample' | 'between' | 'wait';

export interface Section {
  /** When it was entered, in seconds since 1970. */
  readonly ts: number;
  readonly pid: number;
  readonly rank: number;
  /** The step it belongs to. */
  readonly step: number;
  readonly section: string;
}

const RECORD_BYTES = 160;
/** A read may coincide with a write; the next attempt then finds a whole line. */
const READ_ATTEMPTS = 3;

/** Opens .section_rank{r}: one line of fixed length, overwritten in place with one call and never fsynced. */
export function openSectionFile(path: string): { path: string; descriptor: number } {
  const facts = statOrUndefined(path);
  if (facts && !facts.isFile()) throw new UsageError(`${path}: is not a regular file; remove it`);
  try {
    return { path, descriptor: openSync(path, constants.O_WRONLY | constants.O_CREAT | constants.O_TRUNC, 0o644) };
  } catch (error) {
    throw fileError('open', path, error);
  }
}

export function sectionLine({ ts, pid, rank, step, section }: Section): string {
  return `${JSON.stringify({ ts, pid, rank, step, section }).padEnd(RECORD_BYTES - 1)}\n`;
}

/** The section a rank is in; undefined if there is no file or no whole line in it. */
export function readSection(path: string): Section | undefined {
  for (let attempt = 0; attempt < READ_ATTEMPTS; attempt++) {
    const text = readText(path);
    if (text === undefined) return undefined;
    const section = parseSection(text);
    if (section) return section;
  }
  return undefined;
}

/** Undefined for an incomplete line: it is being written, or the disk was full. */
function parseSection(text: string): Section | undefined {
  const parsed = parseObject(text);
  if (typeof parsed?.['section'] !== 'string') return undefined;
  const isWhole = REQUIRED_NUMBERS.every((name) => Number.isFinite(parsed[name]));
  return isWhole ? (parsed as unknown as Section) : undefined;
}
