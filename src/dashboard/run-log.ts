/** A log of a run as buckets for charts, read incrementally: heartbeats of a rank, training.csv or val.csv. */
import { setImmediate, setTimeout } from 'node:timers/promises';
import { parseObject } from '../files.js';
import { asNumber } from '../run/json.js';
import { counterText, failureCounters, MIN_LINE_BYTES, parseHeartbeat } from '../run/logs/heartbeat.js';
import { scalarIn } from '../run/metrics.js';
import type { Mark } from './answers.js';
import { Buckets } from './buckets.js';
import {
  appendRows,
  CHARTED_IN_HEARTBEATS,
  type ChartData,
  LOG_COLUMNS,
  type LogName,
  type LogRow,
} from './chart-data.js';
import { PIECE_BYTES, readLines } from './safe-read.js';

/** A line: a row of the charts, a mark, or neither. */
export interface Parsed {
  readonly row?: LogRow;
  readonly mark?: Mark;
}

/** Buckets per log. A chart has fewer pixels. */
const CAPACITY = 2048;
/** A zoomed range of at most this many bytes is read again from the file, row by row. */
const DETAIL_BYTES = 24 * 1024 * 1024;
/** A window that holds a whole line after the one it begins in. */
const SAMPLE_BYTES: Readonly<Record<LogName, number>> = { heartbeat: 2048, training: 256, val: 256 };
/** A longer file is sampled before it is read, so that the whole run is drawn at once. */
const SKETCH_BYTES = 8 * 1024 * 1024;
const SKETCH_ROWS = 512;
const MAX_MARKS = 4000;
/** Marks of failures; a run can have one at every step. */
const MAX_FAILURES = 200;
const DETAIL_LENGTH = 300;

export class RunLog {
  readonly path: string;
  readonly kind: LogName;
  readonly #buckets: Buckets;
  #marks: Mark[] = [];
  #failures = 0;
  #counters = new CounterWatch();
  #position = 0;
  #size = 0;
  #inode = -1;
  #damaged = 0;
  /** Rows at evenly spaced positions of a file that is being read. */
  #sketch: readonly LogRow[] = [];
  #catchingUp: Promise<void> | null = null;
  /** When the log was last used, for eviction. */
  usedAt = 0;

  constructor(path: string, kind: LogName, capacity = CAPACITY) {
    this.path = path;
    this.kind = kind;
    this.#buckets = new Buckets(LOG_COLUMNS[kind], capacity);
  }

  get marks(): readonly Mark[] {
    return this.#marks;
  }

  /** Lines that are no records. */
  get damaged(): number {
    return this.#damaged;
  }

  get progress(): { readonly read: number; readonly size: number } {
    return { read: this.#position, size: this.#size };
  }

  /** Reads what was appended, up to one slice; true if more is left. */
  readSlice(): boolean {
    const add = (line: string, offset: number) => this.#add(line, offset);
    const shortest = this.kind === 'heartbeat' ? MIN_LINE_BYTES : 1;
    const found = readLines(this.path, this.#position, this.#position + PIECE_BYTES, add, shortest);
    if (found === undefined) {
      if (this.#position > 0) this.#reset();
      return false;
    }
    const isReplaced = (this.#inode >= 0 && found.inode !== this.#inode) || found.size < this.#position;
    this.#inode = found.inode;
    if (isReplaced) {
      // training.csv is rewritten when a run resumes from an earlier step.
      this.#reset();
      return found.size > 0;
    }
    if (this.#position === 0 && found.size > SKETCH_BYTES) this.#sketch = this.#rowsAt(SKETCH_ROWS);
    else if (found.end >= found.size) this.#sketch = [];
    const moved = found.end > this.#position;
    this.#position = found.end;
    this.#size = found.size;
    return moved && found.end < found.size;
  }

  /**
   * Reads everything that was appended, yielding to the event loop between slices. Waits at most `patience` milliseconds
   * for it; the reading goes on afterwards.
   */
  async catchUp(patience?: number): Promise<void> {
    this.#catchingUp ??= this.#readAll().finally(() => {
      this.#catchingUp = null;
    });
    const limit = new AbortController();
    const timeout = patience === undefined ? [] : [setTimeout(patience, undefined, { signal: limit.signal })];
    try {
      await Promise.race([this.#catchingUp, ...timeout]);
    } finally {
      limit.abort();
    }
  }

  /** Buckets of a range of steps; single rows where the range is small enough to be read again. */
  chartData(from = Number.NEGATIVE_INFINITY, to = Number.POSITIVE_INFINITY): ChartData {
    const coarse = this.#buckets.chartData(from, to, this.#position, this.#size);
    const isInside = (step: number) => step >= from && step <= to;
    const ahead = this.#sketch.filter(({ step }) => step > this.#buckets.lastStep && isInside(step));
    if (ahead.length > 0) return appendRows(coarse, ahead);
    if (coarse.exact) return coarse;
    const [begin, end] = this.#buckets.bytes(this.#buckets.range(from, to), this.#position);
    if (end - begin > DETAIL_BYTES) return coarse;
    const detail = new Buckets(LOG_COLUMNS[this.kind], this.#buckets.capacity);
    readLines(this.path, begin, end, (line) => {
      const { row } = parseLine(this.kind, line);
      if (row && isInside(row.step)) detail.add(row.step, row.time, row.values);
    });
    return detail.chartData(from, to, this.#position, this.#size);
  }

  /** Values of a column at up to `count` evenly spaced positions of the file, without reading all of it. */
  sample(count: number, column: number): number[] {
    const rows = this.#rowsAt(count);
    const stride = Math.max(1, rows.length / count);
    const kept = Array.from({ length: Math.min(count, rows.length) }, (_, i) => rows[Math.floor(i * stride)]);
    if (rows.length > 0) kept.push(rows.at(-1)!);
    return kept.map(({ values }) => values[column]).filter(Number.isFinite);
  }

  /** Rows of ascending steps from `count` windows of the file; all rows of a small file. */
  #rowsAt(count: number): LogRow[] {
    const rows: LogRow[] = [];
    const window = SAMPLE_BYTES[this.kind];
    const size = readLines(this.path, 0, 0, () => {})?.size ?? 0;
    const isSmall = size <= window * count;
    const starts = isSmall ? [0] : Array.from({ length: count }, (_, i) => Math.floor((size * i) / count));
    for (const start of starts) {
      let isPartial = start > 0; // a window mostly begins inside a line
      readLines(this.path, start, isSmall ? size : start + window, (line) => {
        const { row } = isPartial ? {} : parseLine(this.kind, line);
        if (row && (rows.length === 0 || row.step > rows.at(-1)!.step)) rows.push(row);
        isPartial = false;
      });
    }
    return rows;
  }

  async #readAll(): Promise<void> {
    while (this.readSlice()) await setImmediate();
  }

  #reset(): void {
    this.#position = 0;
    this.#damaged = 0;
    this.#failures = 0;
    this.#counters = new CounterWatch();
    this.#marks = [];
    this.#sketch = [];
    this.#buckets.clear();
  }

  #add(line: string, offset: number): void {
    const { row, mark } = line === '' ? {} : parseLine(this.kind, line);
    if (row) this.#buckets.add(row.step, row.time, row.values, offset);
    if (mark) this.#mark(mark);
    const alert = this.kind === 'heartbeat' ? this.#counters.mark(line) : undefined;
    if (alert) this.#mark(alert);
    if (!row && !mark && offset > 0) this.#damaged += 1;
  }

  #mark(mark: Mark): void {
    if (['non-finite', 'alert', 'spike'].includes(mark.kind) && ++this.#failures > MAX_FAILURES) return;
    this.#marks.push(mark);
    if (this.#marks.length > MAX_MARKS) this.#marks = this.#marks.slice(-MAX_MARKS / 2);
  }
}

/** Watches the counters of failures in heartbeats, which rarely change. */
export class CounterWatch {
  #text: string | null = null;
  #counts: ReadonlyMap<string, number> = new Map();

  /** The mark of a line in which a counter grew. The first line has none: its counts may be old. */
  mark(line: string): Mark | undefined {
    const text = counterText(line);
    // Compared as text: most of millions of lines end here.
    if (text === undefined || text === this.#text) return undefined;
    const beat = parseHeartbeat(line);
    if (!beat) return undefined;
    const isFirst = this.#text === null;
    const counts = new Map([...failureCounters(beat), ['spike', beat.fb_spike ?? 0] as [string, number]]);
    const grown = [...counts].map(([name, count]) => [name, count - (this.#counts.get(name) ?? 0)] as const);
    this.#text = text;
    this.#counts = counts;
    const more = grown.filter(([, growth]) => growth > 0);
    if (isFirst || more.length === 0) return undefined;
    const { step, ts } = beat;
    if (more.every(([name]) => name === 'spike'))
      return { step, ts, kind: 'spike', detail: 'unusual loss or gradient' };
    return { step, ts, kind: 'alert', detail: more.map(([name, growth]) => `${name} +${growth}`).join(', ') };
  }
}

export function parseLine(kind: LogName, line: string): Parsed {
  return kind === 'heartbeat' ? parseBeat(line) : parseCsv(line, LOG_COLUMNS[kind].length);
}

const REQUIRED_NUMBERS = ['ts', 'pid', 'rank', 'step'];

/** Millions of lines are steps: of these only the columns are checked. */
function parseBeat(line: string): Parsed {
  const record = line.includes('"msg"') ? parseObject(line) : undefined; // searching garbage is fast, parsing is not
  if (!record) return {};
  if (record['msg'] !== 'progress') return parseEvent(line);
  if (!REQUIRED_NUMBERS.every((name) => Number.isFinite(record[name]))) return {};
  const { step, ts } = record as { step: number; ts: number };
  const numberIn = (value: unknown) => asNumber(value) ?? Number.NaN;
  const values = CHARTED_IN_HEARTBEATS.map((scalar) => numberIn(scalarIn(record, scalar)));
  const row = { step, time: ts, values };
  const [loss, norm] = [record['loss'], record['grad_norm']].map(asNumber);
  if (!isNonFinite(loss) && !isNonFinite(norm)) return { row };
  return { row, mark: { step, ts, kind: 'non-finite', detail: `loss ${loss}, gradient norm ${norm}` } };
}

function parseEvent(line: string): Parsed {
  const beat = parseHeartbeat(line);
  if (!beat) return {};
  const value = beat.val_loss ?? beat.loss; // `loss`: of an evaluation by an earlier version
  const loss = value === undefined ? '' : `loss ${Number(value.toPrecision(5))}`;
  // A checkpoint is named by its path, which may be absolute.
  const detail = (beat.detail ?? beat.data ?? loss).replace(/^\/.*\/(?=checkpoints\/)/, '').slice(0, DETAIL_LENGTH);
  return { mark: { step: beat.step, ts: beat.ts, kind: beat.msg, detail } };
}

function isNonFinite(value: number | undefined): boolean {
  return value !== undefined && !Number.isFinite(value);
}

/** A row whose first cell is a step. The header and damaged rows are neither row nor mark. */
function parseCsv(line: string, columns: number): Parsed {
  const cells = line.split(',');
  const step = Number(cells[0]);
  if (cells.length < columns + 1 || cells[0] === '' || !Number.isFinite(step)) return {};
  return { row: { step, time: Number.NaN, values: cells.slice(1, columns + 1).map(Number) } };
}
