/** The CSV files of a run: append-only while it runs, cut back to the checkpoint when it resumes. Written by log.ts. */
import { UsageError } from '../../errors.js';
import { readFully, readText, withFile, writeFileAtomic } from '../../files.js';
import { type ColumnKind, type CsvFile, isLater, METRIC_ENTRIES, type METRICS, type MetricName } from '../metrics.js';
import { AppendFile } from './log-file.js';

/** Columns in the order of the file; the first is always the step. */
export type CsvSchema = { readonly step: 'integer' } & Readonly<Record<string, ColumnKind>>;
/** One row by column. */
export type CsvRow<Schema extends CsvSchema> = {
  -readonly [Column in keyof Schema as Schema[Column] extends `${string}?`
    ? never
    : Column]: Schema[Column] extends 'text' ? string : number;
} & { -readonly [Column in keyof Schema as Schema[Column] extends `${string}?` ? Column : never]?: number };

type Table = typeof METRICS;
type MetricColumns<File extends CsvFile> = { readonly step: 'integer' } & {
  readonly [Name in MetricName as Table[Name] extends { readonly csv: Readonly<Record<File, ColumnKind>> }
    ? Name
    : never]: Table[Name] extends { readonly csv: Readonly<Record<File, infer Kind extends ColumnKind>> }
    ? Kind
    : never;
};

/** The step and the metrics of a file. */
function metricColumns<File extends CsvFile>(file: File): MetricColumns<File> {
  const columns = METRIC_ENTRIES.flatMap(([name, { csv }]) => (csv?.[file] ? [[name, csv[file]]] : []));
  return { step: 'integer', ...Object.fromEntries(columns) } as MetricColumns<File>;
}

/** Columns of training.csv. */
export const TRAINING_CSV = metricColumns('training');
/** Columns of val.csv. */
export const VAL_CSV = metricColumns('val');
export const K_STATS_CSV = metricColumns('kStats');
/** One row per counter: a new counter in a newer version then needs no new column in the file of a resumed run. */
export const FALLBACK_COUNTERS_CSV = { step: 'integer', counter: 'text', count: 'integer' } as const;

/** One row per metric of the program's own, which may be others in every step. */
export const OWN_METRICS_CSV = { step: 'integer', metric: 'text', value: 'float32' } as const;

/** One row per metric and source of a mixture, named METRIC/SOURCE. */
export const SOURCE_METRICS_CSV = OWN_METRICS_CSV;

/** Enough for some hundred rows. */
const TAIL_BYTES = 64 * 1024;

/**
 * Opens or creates a file for appending, removes an incomplete last row, and refuses a file with other columns. Rows of
 * steps after `keepThrough` are removed. A file of an earlier version gets the later columns, empty in its rows. A crash
 * leaves the old content or the new.
 */
export function openCsvFile(path: string, schema: CsvSchema, keepThrough = Number.POSITIVE_INFINITY): AppendFile {
  addLaterColumns(path, schema);
  const file = openWithHeader(path, schema);
  const lines = wholeLines(readText(path) ?? '');
  const kept = lines.filter((line, index) => index === 0 || !(Number.parseInt(line, 10) > keepThrough));
  if (kept.length === lines.length) return file;
  file.close();
  writeFileAtomic(path, kept.map((line) => `${line}\n`).join(''));
  return openWithHeader(path, schema);
}

/** Rewrites a file that lacks later columns only. */
function addLaterColumns(path: string, schema: CsvSchema): void {
  const [header, ...lines] = wholeLines(readText(path) ?? '');
  const found = header?.split(',') ?? [];
  const missing = Object.entries(schema).filter(([name]) => !found.includes(name));
  const isEarlier =
    missing.length > 0 && missing.every(([, kind]) => isLater(kind)) && found.every((name) => name in schema);
  if (!isEarlier) return;
  const widened = lines.map((line) => {
    const cells = line.split(',');
    if (cells.length !== found.length) return line; // damaged
    return Object.keys(schema)
      .map((name) => cells[found.indexOf(name)] ?? '')
      .join(',');
  });
  writeFileAtomic(path, [headerOf(schema), ...widened].map((line) => `${line}\n`).join(''));
}

/** Writes the header of a new file; refuses another header. */
function openWithHeader(path: string, schema: CsvSchema): AppendFile {
  const header = headerOf(schema);
  const file = new AppendFile(path);
  try {
    if (file.size === 0) file.append(Buffer.from(`${header}\n`));
    const found = wholeLines(readText(path) ?? '')[0];
    if (found !== header)
      throw new UsageError(`${path}: its columns are "${found}", not "${header}"; move the file away`);
    return file;
  } catch (error) {
    file.close();
    throw error;
  }
}

/** The complete rows of a CSV file. */
export interface CsvContent<Schema extends CsvSchema> {
  rows: CsvRow<Schema>[];
  /** Lines that are no rows: damage, which a check may want to name. */
  badLines: number;
}

/**
 * Reads the whole rows of a file that may be growing, missing (no rows) or damaged in places. Columns are found by their
 * names, so files with more columns are read too; those of an earlier version lack later columns.
 */
export function readCsv<Schema extends CsvSchema>(path: string, schema: Schema): CsvContent<Schema> {
  return parseLines(path, schema, wholeLines(readText(path) ?? ''));
}

/** The last `count` rows, from the end of the file alone, however long it is. */
export function tailCsv<Schema extends CsvSchema>(path: string, schema: Schema, count: number): CsvContent<Schema> {
  const [beginning, end] = readEnds(path);
  const [header, ...first] = wholeLines(beginning);
  if (header === undefined) return { rows: [], badLines: 0 };
  // The part that is the end mostly begins inside a line.
  const lines = end === null ? first : wholeLines(end).slice(1);
  return parseLines(path, schema, [header, ...lines.slice(-count)]);
}

/** The first bytes of a file and the last; `null` when the first are all. */
function readEnds(path: string): [beginning: string, end: string | null] {
  const ends = withFile<[string, string | null]>(path, (descriptor, size) => {
    const read = (start: number) => {
      const bytes = new Uint8Array(Math.min(TAIL_BYTES, size - start));
      return new TextDecoder().decode(bytes.subarray(0, readFully(descriptor, bytes, start)));
    };
    return [read(0), size <= TAIL_BYTES ? null : read(size - TAIL_BYTES)];
  });
  return ends ?? ['', null];
}

function parseLines<Schema extends CsvSchema>(
  path: string,
  schema: Schema,
  [header, ...lines]: readonly string[],
): CsvContent<Schema> {
  const content: CsvContent<Schema> = { rows: [], badLines: 0 };
  if (header === undefined) return content;
  const names = header.split(',');
  const columns = Object.entries(schema).map(([name, kind]) => ({ name, kind, index: names.indexOf(name) }));
  const missing = columns.find(({ kind, index }) => index < 0 && !isLater(kind));
  if (missing) throw new UsageError(`${path}: there is no column ${missing.name}; expected "${headerOf(schema)}"`);
  for (const line of lines) {
    const cells = line.split(',');
    const row: Record<string, number | string | undefined> = {};
    for (const { name, kind, index } of columns) row[name] = parseCell(kind, cells[index]);
    const isBad =
      cells.length !== names.length || columns.some(({ name, index }) => isBadCell(row[name], cells[index]));
    if (isBad) content.badLines++;
    else content.rows.push(row as CsvRow<Schema>);
  }
  return content;
}

function headerOf(schema: CsvSchema): string {
  return Object.keys(schema).join(',');
}

/** A row as a line. */
export function formatRow<Schema extends CsvSchema>(schema: Schema, row: CsvRow<Schema>): string {
  const values = row as Readonly<Record<string, number | string | undefined>>;
  const cells = Object.entries(schema).map(([name, kind]) => formatCell(kind, values[name]));
  return `${cells.join(',')}\n`;
}

function formatCell(kind: ColumnKind, value: number | string | undefined): string {
  if (value === undefined) return '';
  if (typeof value === 'string') return value.replace(/[,\r\n"]/g, '_');
  if (kind.startsWith('float32')) return formatFloat32(value);
  return kind.startsWith('tenths') && Number.isFinite(value) ? String(Number(value.toFixed(1))) : String(value);
}

function parseCell(kind: ColumnKind, cell: string | undefined): number | string | undefined {
  if (kind === 'text') return cell ?? '';
  if (isLater(kind) && !cell) return undefined;
  return cell === undefined || cell.trim() === '' ? Number.NaN : Number(cell);
}

/** Only a literal NaN is accepted as NaN: any other non-number is damage. */
function isBadCell(value: number | string | undefined, cell: string | undefined): boolean {
  return typeof value === 'number' && Number.isNaN(value) && cell !== 'NaN';
}

/** The lines that end with a newline: a line still being written, or left half by a crash, is not one. */
function wholeLines(text: string): string[] {
  return text
    .slice(0, text.lastIndexOf('\n') + 1)
    .split('\n')
    .slice(0, -1);
}

/**
 * Prints a float32 with the fewest digits that read back as the same float32. More digits would be meaningless
 * (0.1 -> 0.10000000149011612); with fewer, two different losses could look equal.
 */
export function formatFloat32(value: number): string {
  const single = Math.fround(value);
  if (!Number.isFinite(single)) return String(single);
  // Nine digits are always enough for a float32.
  for (let digits = 1; digits < 9; digits++) {
    const candidate = Number(single.toPrecision(digits));
    if (Math.fround(candidate) === single) return String(candidate);
  }
  return String(Number(single.toPrecision(9)));
}
