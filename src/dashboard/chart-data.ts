/**
 * The data of charts, and their binary form between the server and the pages: a JSON header, then Float64 columns. Both sides
 * import this module, so it uses neither Node nor the browser.
 */
import { METRIC_ENTRIES, SCALARS } from '../run/metrics.js';

/** A log that charts are drawn from. */
export type LogName = 'heartbeat' | 'training' | 'val';
/** All sources of charts: the logs, and the files of metrics by name (named-metrics.ts). */
export type ChartSource = LogName | 'own' | 'source';

/** Numbers of heartbeats that a chart shows. */
export const CHARTED_IN_HEARTBEATS = SCALARS.filter(({ log, chart }) => log === 'heartbeat' && chart !== undefined);

const csvColumns = (file: 'training' | 'val') =>
  METRIC_ENTRIES.flatMap(([name, { csv }]) => (csv?.[file] ? [name as string] : []));

/** Columns of each log, in the order of its rows. Those of a CSV file follow its step. */
export const LOG_COLUMNS: Readonly<Record<LogName, readonly string[]>> = {
  heartbeat: CHARTED_IN_HEARTBEATS.map(({ name }) => name),
  training: csvColumns('training'),
  val: csvColumns('val'),
};

/** Everything but the numbers. */
export interface ChartDataHeader {
  readonly columns: readonly string[];
  readonly buckets: number;
  /** Byte offset in the file up to which rows are included: where a stream continues. */
  readonly offset: number;
  /** Size of the file; larger than `offset` while the server is still reading it. */
  readonly size: number;
  /** Whether every bucket holds a single row. */
  readonly exact: boolean;
}

/**
 * Buckets of consecutive rows. Each has its first and last step and time; each column has two extremes in the order in
 * which they occurred, and the last value. NaN: no finite value in the bucket.
 */
export interface ChartData extends ChartDataHeader {
  readonly steps: readonly [first: Float64Array, last: Float64Array];
  readonly times: readonly [first: Float64Array, last: Float64Array];
  readonly values: ReadonlyMap<string, ColumnBuckets>;
}

export interface ColumnBuckets {
  readonly first: Float64Array;
  readonly second: Float64Array;
  readonly last: Float64Array;
}

/** A row of a log; values in the order of its columns. */
export interface LogRow {
  readonly step: number;
  readonly time: number;
  readonly values: readonly number[];
}

/** Chart data with rows added at the end, each as a bucket of its own. */
export function appendRows(data: ChartData, rows: readonly LogRow[]): ChartData {
  const joined = (array: Float64Array, more: readonly number[]) => Float64Array.from([...array, ...more]);
  const [steps, times] = [rows.map(({ step }) => step), rows.map(({ time }) => time)];
  const values = new Map<string, ColumnBuckets>();
  data.columns.forEach((name, c) => {
    const { first, second, last } = data.values.get(name)!;
    const more = rows.map((row) => (Number.isFinite(row.values[c]) ? row.values[c] : Number.NaN));
    values.set(name, { first: joined(first, more), second: joined(second, more), last: joined(last, more) });
  });
  return {
    ...data,
    buckets: data.buckets + rows.length,
    exact: false,
    values,
    steps: [joined(data.steps[0], steps), joined(data.steps[1], steps)],
    times: [joined(data.times[0], times), joined(data.times[1], times)],
  };
}

const PREFIX_BYTES = 8;

/** Length of the header (u32), the header padded to 8 bytes, then the columns. */
export function encodeChartData(data: ChartData): Uint8Array {
  const { columns, buckets, offset, size, exact } = data;
  const header = new TextEncoder().encode(JSON.stringify({ columns, buckets, offset, size, exact }));
  const start = PREFIX_BYTES + Math.ceil(header.length / 8) * 8;
  const arrays = [...data.steps, ...data.times];
  for (const name of columns) {
    const { first, second, last } = data.values.get(name)!;
    arrays.push(first, second, last);
  }
  const bytes = new Uint8Array(start + arrays.length * buckets * 8);
  new DataView(bytes.buffer).setUint32(0, header.length, true);
  bytes.set(header, PREFIX_BYTES);
  arrays.forEach((array, i) => {
    new Float64Array(bytes.buffer, start + i * buckets * 8, buckets).set(array);
  });
  return bytes;
}

export function decodeChartData(buffer: ArrayBuffer): ChartData {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, PREFIX_BYTES, length))) as ChartDataHeader;
  const { columns, buckets } = header;
  const start = PREFIX_BYTES + Math.ceil(length / 8) * 8;
  const array = (i: number) => new Float64Array(buffer, start + i * buckets * 8, buckets);
  const values = new Map<string, ColumnBuckets>();
  columns.forEach((name, i) => {
    values.set(name, { first: array(4 + 3 * i), second: array(5 + 3 * i), last: array(6 + 3 * i) });
  });
  return { ...header, steps: [array(0), array(1)], times: [array(2), array(3)], values };
}
