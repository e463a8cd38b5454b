/**
 * The signs of life of a rank, for people, watchdogs and dashboards. heartbeat_rank{r}.jsonl has a line per step with the
 * state of the run. .section_rank{r} names what the rank is doing at this moment, which a heartbeat cannot: it is written
 * after the step. Both are written by log.ts.
 */

import { constants, openSync } from 'node:fs';
import { UsageError } from '../../errors.js';
import { fileError, parseObject, readFully, readText, statOrUndefined, withFile } from '../../files.js';
import { asNumber } from '../json.js';

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

/** What the trainer tells. Memory is in MiB; times are in the unit of their name. */
export interface HeartbeatFields {
  step: number;
  msg: HeartbeatMessage;
  loss?: number;
  toks_per_s?: number;
  dt_fetch_s?: number;
  fetch_p50_ms?: number;
  fetch_p95_ms?: number;
  grad_norm?: number;
  gate_entropy_mean?: number;
  gate_entropy_min?: number;
  /** The largest gate of all tokens and heads, and the mean over them of the largest of three. */
  gate_max_gate?: number;
  gate_max_gate_mean?: number;
  gate_collapse_frac?: number;
  /** Mean gate of the compressed, selected and window branch. */
  gate_branch_shares?: number[];
  sel_k_mean?: number;
  sel_k_max?: number;
  sel_pct_at_max?: number;
  /** Schedule from dense to sparse attention: selected blocks, and the weight given to the other two branches. */
  n_sel?: number;
  gate_released?: number;
  gpu_mem_alloc?: number;
  gpu_mem_reserved?: number;
  mfu?: number;
  /** Documents the loader has read, and batches it holds ready. */
  docs_seen?: number;
  queue_fill?: number;
  /** The source the batch came from: `synthetic` whenever it is not the one that was asked for. */
  data?: string;
  /** What the rank was about to do, so that a watchdog can name where it hangs. */
  section?: string;
  /** The reason behind a loader_error, halt or stop. */
  detail?: string;
  [counter: `fb_${string}`]: number;
}

/** Counters that say which kernel served: they grow in a healthy run. All others count failures and stand-ins. */
const SERVED: ReadonlySet<string> = new Set(['fb_attention_union', 'fb_attention_outer', 'fb_attention_gather']);

/** The counters of a line that should stay near 0. */
export function fallbackCounters(beat: HeartbeatFields): [name: `fb_${string}`, count: number][] {
  return Object.entries(beat).filter(
    (entry): entry is [`fb_${string}`, number] => entry[0].startsWith('fb_') && !SERVED.has(entry[0]),
  );
}

/** A line of the file. */
export interface Heartbeat extends HeartbeatFields {
  /** Seconds since 1970, with fraction. */
  ts: number;
  iso: string;
  pid: number;
  rank: number;
  /** How many ranks the run has; absent in files of earlier versions. */
  world?: number;
}

const TEXT_FIELDS = new Set(['iso', 'msg', 'data', 'section', 'detail']);
const REQUIRED_NUMBERS = ['ts', 'pid', 'rank', 'step'];
/** The end of the file is read in windows that grow until they hold enough lines; the largest window is the limit. */
const WINDOW_BYTES = [64 * 1024, 1024 * 1024, 16 * 1024 * 1024];
const CHUNK_BYTES = 1024 * 1024;
const NEWLINE = 0x0a;

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
    for (const line of textLines(content.subarray(0, end))) {
      const heartbeat = parseHeartbeat(line);
      if (heartbeat) yield heartbeat;
    }
    rest = content.subarray(end);
  }
}

/** Reads a line; undefined when it is no heartbeat. Optional fields of a wrong kind are left out. */
export function parseHeartbeat(line: string): Heartbeat | undefined {
  const parsed = parseObject(line);
  if (typeof parsed?.['msg'] !== 'string') return undefined;
  if (!REQUIRED_NUMBERS.every((name) => Number.isFinite(parsed[name]))) return undefined;
  const heartbeat: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(parsed)) {
    const kept = parseField(name, value);
    if (kept !== undefined) heartbeat[name] = kept;
  }
  return heartbeat as unknown as Heartbeat;
}

function parseField(name: string, value: unknown): number | string | number[] | undefined {
  if (TEXT_FIELDS.has(name)) return typeof value === 'string' ? value : undefined;
  if (name !== 'gate_branch_shares') return asNumber(value);
  const shares = Array.isArray(value) ? value.map(asNumber) : [undefined];
  return shares.every((share) => share !== undefined) ? shares : undefined;
}

/** The window mostly begins inside a line; the rest of a line is no JSON object and goes the way of all garbage. */
function lastRecords(content: Uint8Array, count: number): Heartbeat[] {
  const lines = textLines(content.subarray(0, content.lastIndexOf(NEWLINE) + 1));
  const found: Heartbeat[] = [];
  for (let i = lines.length - 1; i >= 0 && found.length < count; i--) {
    const heartbeat = parseHeartbeat(lines[i]);
    if (heartbeat) found.push(heartbeat);
  }
  return found.reverse();
}

function textLines(bytes: Uint8Array): string[] {
  return new TextDecoder().decode(bytes).split('\n');
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
