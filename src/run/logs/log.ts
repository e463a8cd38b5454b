/**
 * The log files of a run. A record is plain data and gets its form where it is written: on the log thread if there is one,
 * so that the training thread only hands it over. Opening happens here, where a wrong file can still be refused.
 */
import { toJson } from '../json.js';
import { type CsvRow, type CsvSchema, formatRow, openCsvFile } from './csv.js';
import { type HeartbeatFields, openSectionFile, type SectionName, sectionLine } from './heartbeat.js';
import { AppendFile, InPlaceFile, Sink, type SinkOptions } from './log-file.js';
import type { LogThread } from './log-thread.js';
import { encodeEvent, openEventFile, type TensorboardEvent } from './tensorboard.js';

/** An open log file. Nothing throws because of the disk. */
export interface Log<Item> {
  readonly path: string;
  /** Records that could not be written. */
  readonly drops: number;
  write(record: Item): void;
  /** Waits until the records are on the disk; false if they are not. */
  flush(): boolean;
  close(): void;
}

/** Who writes heartbeats and sections. */
interface Writer {
  readonly pid: number;
  readonly rank: number;
  /** How many ranks there are, where that is known. */
  readonly world?: number;
}

/** How the records of a file become bytes. A `section` file holds one record, which each write replaces. */
export type LogFormat =
  | { readonly kind: 'csv'; readonly schema: CsvSchema }
  | { readonly kind: 'lines' | 'json-lines' | 'tensorboard' }
  | { readonly kind: 'heartbeat' | 'section'; readonly writer: Writer };

export interface LogOptions extends SinkOptions {
  /** Takes over the writing; by default records are written on this thread. */
  readonly logThread?: LogThread | undefined;
  /** Milliseconds since 1970. A log thread has its own. */
  readonly clock?: () => number;
}

export interface OpenFile {
  readonly path: string;
  readonly descriptor: number;
}

/** Removes an incomplete last row and rows of steps after `keepThrough`, which a resumed run writes again. */
export function openCsv<Schema extends CsvSchema>(
  path: string,
  schema: Schema,
  { keepThrough, ...options }: LogOptions & { readonly keepThrough?: number } = {},
): Log<CsvRow<Schema>> {
  return openLog(openCsvFile(path, schema, keepThrough), { kind: 'csv', schema }, options);
}

/** heartbeat_rank{r}.jsonl */
export function openHeartbeats(
  path: string,
  rank: number,
  { world, ...options }: LogOptions & { readonly world?: number } = {},
): Log<HeartbeatFields> {
  const writer = { pid: process.pid, rank, ...(world !== undefined && { world }) };
  return openLog(new AppendFile(path), { kind: 'heartbeat', writer }, options);
}

/** .section_rank{r}; closing removes the file. */
export function openSection(
  path: string,
  rank: number,
  options: LogOptions = {},
): Log<{ readonly section: SectionName; readonly step: number }> {
  return openLog(openSectionFile(path), { kind: 'section', writer: { pid: process.pid, rank } }, options);
}

/** Lines of text, as they are. */
export function openLines(path: string, options: LogOptions = {}): Log<string> {
  return openLog(new AppendFile(path), { kind: 'lines' }, options);
}

/** Lines with `step`, `ts` in seconds since 1970, and the fields of the record. */
export function openJsonLines(path: string, options: LogOptions = {}): Log<{ readonly step: number }> {
  return openLog(new AppendFile(path), { kind: 'json-lines' }, options);
}

/** A new TensorBoard file in `folder`: each start of a run has one of its own, and TensorBoard joins them. */
export function openTensorboard(
  folder: string,
  { resumedFromStep, ...options }: LogOptions & { readonly resumedFromStep?: number } = {},
): Log<TensorboardEvent> {
  const file = openEventFile(folder, (options.clock ?? Date.now)());
  const log = openLog<TensorboardEvent>(file, { kind: 'tensorboard' }, options);
  log.write({ step: 0, mark: 'version' });
  // TensorBoard then hides what an earlier file holds beyond the step.
  if (resumedFromStep !== undefined) log.write({ step: resumedFromStep + 1, mark: 'start' });
  return log;
}

function openLog<Item>(file: OpenFile, format: LogFormat, options: LogOptions): Log<Item> {
  const { logThread, clock = Date.now, ...sinkOptions } = options;
  if (logThread) return logThread.open(file, format);
  const sink = openSink(file, format, sinkOptions);
  return {
    path: file.path,
    get drops() {
      return sink.drops;
    },
    write: (record) => sink.write(encodeRecord(format, record, clock())),
    flush: () => sink.flush(),
    close: () => sink.close(),
  };
}

/** Writes the bytes of records to an open file, on this thread. */
export function openSink(
  { path, descriptor }: OpenFile,
  { kind }: LogFormat,
  options: SinkOptions,
): Sink | InPlaceFile {
  if (kind === 'section') return new InPlaceFile(path, descriptor, options.onProblem ?? (() => {}));
  return new Sink(new AppendFile(path, descriptor), options);
}

/** The bytes of a record that was made `at` this time, in milliseconds since 1970. */
export function encodeRecord(format: LogFormat, record: unknown, at: number): Uint8Array {
  const ts = at / 1000;
  switch (format.kind) {
    case 'csv':
      return Buffer.from(formatRow(format.schema, record as CsvRow<CsvSchema>));
    case 'lines':
      return Buffer.from(`${record as string}\n`);
    case 'json-lines': {
      const { step, ...fields } = record as { step: number };
      return Buffer.from(`${toJson({ step, ts, ...fields })}\n`);
    }
    case 'heartbeat': {
      const { pid, ...rank } = format.writer;
      const identity = { ts, iso: new Date(at).toISOString(), pid, ...rank };
      return Buffer.from(`${toJson({ ...identity, ...(record as HeartbeatFields) })}\n`);
    }
    case 'section': {
      const { step, section } = record as { step: number; section: SectionName };
      return Buffer.from(sectionLine({ ts, ...format.writer, step, section }));
    }
    case 'tensorboard':
      return encodeEvent(record as TensorboardEvent, ts);
  }
}
