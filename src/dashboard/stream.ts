/**
 * Server-Sent Events. A stream of runs sends new rows of their heartbeats; the id of an event is the byte offset of each
 * file, so a reconnecting browser (`Last-Event-ID`) continues where it was. A stream without runs sends changed table rows.
 */
import type { ServerResponse } from 'node:http';
import { TrefoilError } from '../errors.js';
import { EventStream, eventFrame } from '../http/event-stream.js';
import { toJson } from '../run/json.js';
import type { RunRow } from './answers.js';
import { CounterWatch, parseLine } from './run-log.js';
import type { Runs } from './runs.js';
import { PIECE_BYTES, readLines } from './safe-read.js';

/** A file that a stream follows. */
export interface Followed {
  readonly path: string;
  offset: number;
}

const POLL_MS = 100;
const TABLE_MS = 1_000;
const KEEP_ALIVE_SECONDS = 15;
/** A client that is further behind reads the chart anew instead. */
const MAX_BEHIND = 4 * 1024 * 1024;

/** Sends new rows until the client disconnects. */
export function streamRows(response: ServerResponse, followed: readonly Followed[]): void {
  const stream = startStream(response);
  const counters = followed.map(() => new CounterWatch());
  const look = () => {
    if (stream.isWaiting) return; // a slow client: rows wait in the file
    for (const [i, file] of followed.entries()) {
      const rows: (readonly (number | null)[])[] = [];
      const marks: unknown[] = [];
      const found = read(file, (line) => {
        const { row, mark } = parseLine('heartbeat', line);
        if (row) rows.push([row.step, row.time, ...row.values.map((value) => (Number.isFinite(value) ? value : null))]);
        const alert = counters[i].mark(line);
        if (mark) marks.push(mark);
        if (alert) marks.push(alert);
      });
      if (!found) continue;
      if (found.size < file.offset || found.size - file.offset > MAX_BEHIND) {
        file.offset = found.size;
        stream.send(eventFrame(toJson({ run: i }), { event: 'reset', id: idOf(followed) }));
        continue;
      }
      file.offset = found.end;
      if (rows.length === 0 && marks.length === 0) continue;
      stream.send(eventFrame(toJson({ run: i, rows, marks }), { event: 'rows', id: idOf(followed) }));
    }
  };
  repeat(response, stream, look, POLL_MS);
}

/** Sends the rows of the table that changed, about once a second. */
export function streamTable(response: ServerResponse, runs: Runs): void {
  const stream = startStream(response);
  const sent = new Map<string, string>();
  const send = (changed: readonly RunRow[], gone: readonly string[]) =>
    stream.send(eventFrame(toJson({ changed, gone }), { event: 'runs' }));
  const look = async () => {
    const rows = await runs.rows();
    const changed = rows.filter((row) => sent.get(row.name) !== JSON.stringify(row));
    const gone = [...sent.keys()].filter((name) => !rows.some((row) => row.name === name));
    for (const row of changed) sent.set(row.name, JSON.stringify(row));
    for (const name of gone) sent.delete(name);
    if (changed.length > 0 || gone.length > 0) send(changed, gone);
    await runs.updateAlerts((row: RunRow) => {
      sent.set(row.name, JSON.stringify(row));
      send([row], []);
    });
  };
  repeat(response, stream, look, TABLE_MS);
}

/** The offsets of a stream in its ids: `120-4000`. */
export function parseOffsets(text: string | undefined, count: number): number[] | undefined {
  const offsets = (text ?? '').split('-').map((part) => (/^\d{1,15}$/.test(part) ? Number(part) : Number.NaN));
  return offsets.length === count && offsets.every(Number.isSafeInteger) ? offsets : undefined;
}

function idOf(followed: readonly Followed[]): string {
  return followed.map(({ offset }) => offset).join('-');
}

/** Undefined if the file is missing or cannot be read now; the next look tries again. */
function read(file: Followed, onLine: (line: string) => void): { end: number; size: number } | undefined {
  try {
    return readLines(file.path, file.offset, file.offset + PIECE_BYTES, onLine);
  } catch (error) {
    if (!(error instanceof TrefoilError)) throw error;
    return undefined;
  }
}

function startStream(response: ServerResponse): EventStream {
  const stream = new EventStream(response);
  stream.send('retry: 1000\n\n');
  return stream;
}

/**
 * Calls `look` now and `interval` after each end of it, until the client disconnects. Comments show a proxy that the
 * stream is alive. An error ends the stream; the browser connects again.
 */
function repeat(
  response: ServerResponse,
  stream: EventStream,
  look: () => void | Promise<void>,
  interval: number,
): void {
  const comments = setInterval(() => stream.keepAlive(KEEP_ALIVE_SECONDS), KEEP_ALIVE_SECONDS * 1000);
  let next: NodeJS.Timeout | undefined;
  response.once('close', () => {
    clearInterval(comments);
    clearTimeout(next);
  });
  const turn = async () => {
    try {
      await look();
    } catch (error) {
      console.error(error); // a defect of the program: readers of files report theirs in the rows
      response.destroy();
    }
    if (!response.destroyed) next = setTimeout(turn, interval);
  };
  void turn();
}
