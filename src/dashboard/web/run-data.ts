/** The curves of one run in the browser: buckets from the server, and rows that arrived since. */
import type { Mark } from '../answers.js';
import { type ChartData, type ChartSource, LOG_COLUMNS } from '../chart-data.js';
import { api } from './api.js';

/** Unit of the x axis. */
export type Axis = 'step' | 'tokens' | 'time';

/** Points of a line: `x` ascends strictly. */
export interface Points {
  readonly x: readonly number[];
  readonly y: readonly (number | null)[];
}

/** A row of a stream: step, time, then the heartbeat columns. */
type StreamRow = readonly (number | null)[];

/** Rows after which the chart is read anew from the server, in buckets. */
const MAX_LIVE_ROWS = 4000;

export interface RunDataOptions {
  readonly rank?: number;
  /** In legends. Default: the name. */
  readonly label?: string;
  /** Where the columns come from. Default: the server. */
  readonly columns?: typeof api.columns;
}

export class RunData {
  readonly name: string;
  readonly rank: number;
  readonly label: string;
  readonly #columns: typeof api.columns;
  tokensPerStep: number | null = null;
  marks: Mark[] = [];
  #charts = new Map<ChartSource, ChartData>();
  /** Rows of a zoomed range. */
  #detail: ChartData | null = null;
  #live: StreamRow[] = [];

  constructor(name: string, { rank = 0, label = name, columns = api.columns }: RunDataOptions = {}) {
    this.name = name;
    this.rank = rank;
    this.label = label;
    this.#columns = columns;
  }

  /** Reads all curves. */
  async load(): Promise<void> {
    const logs: ChartSource[] = ['heartbeat', ...this.#smallLogs];
    const charts = await Promise.all(logs.map((log) => this.#columns(this.name, { log, rank: this.rank })));
    this.#charts = new Map(logs.map((log, i) => [log, charts[i]]));
    this.#live = [];
  }

  /** The small logs, which change rarely. */
  async loadSmall(): Promise<void> {
    for (const log of this.#smallLogs) this.#charts.set(log, await this.#columns(this.name, { log }));
  }

  /** Rank 0 writes those for all. */
  get #smallLogs(): ChartSource[] {
    return this.rank === 0 ? ['training', 'val', 'own', 'source'] : [];
  }

  /** Names of the program's own metrics. */
  get ownMetrics(): readonly string[] {
    return this.#charts.get('own')?.columns ?? [];
  }

  /** Metrics by source of a mixture, as METRIC/SOURCE. */
  get sourceMetrics(): readonly string[] {
    return this.#charts.get('source')?.columns ?? [];
  }

  /** The rows of a range of steps, or the whole run. */
  async zoom(range: readonly [from: number, to: number] | null): Promise<void> {
    this.#detail = range
      ? await this.#columns(this.name, { log: 'heartbeat', rank: this.rank, from: range[0], to: range[1] })
      : null;
  }

  /** Byte offset from which a stream continues. */
  get offset(): number {
    return this.#charts.get('heartbeat')?.offset ?? 0;
  }

  /** Share of the heartbeat file that the server has read. */
  get progress(): number {
    const data = this.#charts.get('heartbeat');
    return !data || data.size === 0 ? 1 : data.offset / data.size;
  }

  /** Adds streamed rows; returns false if the curves should be loaded anew. */
  append(rows: readonly StreamRow[], marks: readonly Mark[]): boolean {
    this.marks = [...this.marks, ...marks];
    for (const row of rows) {
      const last = this.#live.at(-1)?.[0] ?? this.#lastStep;
      if ((row[0] ?? 0) <= last) return false; // a resumed run repeats steps
      this.#live.push(row);
    }
    return this.#live.length < MAX_LIVE_ROWS;
  }

  /** The newest value of a heartbeat column. */
  latest(column: string): number | null {
    const at = 2 + LOG_COLUMNS.heartbeat.indexOf(column);
    const live = this.#live.at(-1)?.[at];
    if (live !== undefined && live !== null) return live;
    const value = this.#charts.get('heartbeat')?.values.get(column)?.last.at(-1);
    return value === undefined || Number.isNaN(value) ? null : value;
  }

  get lastStep(): number {
    return this.#live.at(-1)?.[0] ?? this.#lastStep;
  }

  get #lastStep(): number {
    return this.#charts.get('heartbeat')?.steps[1].at(-1) ?? 0;
  }

  /** The points of a column. In a zoomed range single rows; elsewhere two extremes per bucket in their order. */
  points(log: ChartSource, column: string, axis: Axis): Points {
    const base = this.#charts.get(log);
    const isBeat = log === 'heartbeat';
    const data = (isBeat && this.#detail) || base;
    if (!data) return { x: [], y: [] };
    const points = expand(data, column, (step, time) => this.#place(step, time, axis));
    if (isBeat && !this.#detail) {
      const at = 2 + data.columns.indexOf(column);
      for (const row of this.#live) add(points, this.#place(row[0] ?? 0, row[1] ?? Number.NaN, axis), row[at]);
    }
    return points;
  }

  /** Where a step lies on an axis. */
  place(step: number, time: number, axis: Axis): number {
    return this.#place(step, time, axis);
  }

  /** The step at a place of an axis; between known rows it is interpolated. */
  stepAt(place: number, axis: Axis): number {
    if (axis === 'step') return place;
    if (axis === 'tokens') return place / (this.tokensPerStep ?? 1);
    const data = this.#charts.get('heartbeat');
    if (!data) return 0;
    const time = place + this.#start;
    return interpolate(data.times[1], data.steps[1], time);
  }

  get #start(): number {
    return this.#charts.get('heartbeat')?.times[0][0] ?? 0;
  }

  #place(step: number, time: number, axis: Axis): number {
    if (axis === 'step') return step;
    if (axis === 'tokens') return step * (this.tokensPerStep ?? 1);
    const data = this.#charts.get('heartbeat');
    // CSV files have no times: take those of the heartbeats.
    const known = Number.isNaN(time) && data ? interpolate(data.steps[1], data.times[1], step) : time;
    return known - this.#start;
  }
}

interface GrowingPoints {
  readonly x: number[];
  readonly y: (number | null)[];
}

function expand(data: ChartData, column: string, place: (step: number, time: number) => number): GrowingPoints {
  const points: GrowingPoints = { x: [], y: [] };
  const values = data.values.get(column);
  if (!values) return points;
  const { first, second, last } = values;
  const [steps, times] = [data.steps, data.times];
  for (let i = 0; i < data.buckets; i++) {
    const begin = place(steps[0][i], times[0][i]);
    const end = place(steps[1][i], times[1][i]);
    if (steps[0][i] === steps[1][i]) add(points, end, last[i]);
    else {
      add(points, begin, first[i]);
      add(points, end, second[i]);
    }
  }
  return points;
}

/** Keeps x strictly ascending, as the chart requires: clocks may stand still or jump back. */
function add({ x, y }: GrowingPoints, place: number, value: number | null | undefined): void {
  const previous = x.at(-1) ?? Number.NEGATIVE_INFINITY;
  if (Number.isNaN(place)) return;
  x.push(place > previous ? place : previous + Math.max(1e-6, Math.abs(previous) * 1e-12));
  y.push(value === null || value === undefined || Number.isNaN(value) ? null : value);
}

/** The value of `to` where `from` (ascending) reaches `at`. */
export function interpolate(from: ArrayLike<number>, to: ArrayLike<number>, at: number): number {
  let [low, high] = [0, from.length - 1];
  if (high < 0) return Number.NaN;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (from[middle] < at) low = middle + 1;
    else high = middle;
  }
  if (low === 0 || from[low] < at) return to[low];
  const share = (at - from[low - 1]) / (from[low] - from[low - 1] || 1);
  return to[low - 1] + share * (to[low] - to[low - 1]);
}

/** Exponential moving average; `weight` of the past, 0 to below 1. Gaps stay gaps. */
export function smooth(values: readonly (number | null)[], weight: number): (number | null)[] {
  let mean: number | null = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

/** Follows runs until `close` is called. */
export function follow(
  runs: readonly RunData[],
  { onChange, onState }: { readonly onChange: (reload: boolean) => void; readonly onState: (isLive: boolean) => void },
): () => void {
  const query = new URLSearchParams();
  for (const { name, rank } of runs) {
    query.append('run', name);
    query.append('rank', String(rank));
  }
  query.set('from', runs.map(({ offset }) => offset).join('-'));
  const source = new EventSource(`/api/stream?${query}`);
  source.addEventListener('open', () => onState(true));
  source.addEventListener('error', () => onState(false));
  source.addEventListener('rows', (event) => {
    const { run, rows, marks } = JSON.parse((event as MessageEvent<string>).data);
    onChange(!runs[run].append(rows, marks));
  });
  source.addEventListener('reset', () => onChange(true));
  return () => source.close();
}
