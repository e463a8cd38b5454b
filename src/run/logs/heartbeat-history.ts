/**
 * Heartbeats of a certain time, out of a file of any size. Lines are found by position and time by bisection, so a file of
 * gigabytes costs a few dozen small reads. Where the clock of the trainer jumped, the wrong lines may be found; never an error.
 */
import { readFully, withFile } from '../../files.js';
import { type Heartbeat, parseHeartbeat } from './heartbeat.js';

const NEWLINE = 0x0a;
const BRACE = 0x7b;
/** A line has about 700 bytes; the larger window passes over garbage between two lines. */
const WINDOW_BYTES = [4 * 1024, 64 * 1024, 1024 * 1024];
/** Longer lines are no heartbeats. */
const MAX_LINE_BYTES = 16 * 1024;
/** Each search passes over lines of this total cost; a file full of garbage would otherwise be parsed hundreds of times. */
const GARBAGE_COST = 16 * 1024;
const LINE_COST = 128;

interface Found {
  readonly heartbeat: Heartbeat;
  readonly start: number;
}

/** At most `count` heartbeats between two times (seconds since 1970), evenly spread over the bytes between, oldest first. */
export function sampleHeartbeats(path: string, from: number, to: number, count: number): Heartbeat[] {
  const sample = withFile(path, (descriptor, size) => {
    const first = firstAtOrAfter(descriptor, size, from);
    const end = firstAtOrAfter(descriptor, size, to);
    const found = new Map<number, Heartbeat>();
    for (let i = 0; i < count && first < end; i++) {
      const line = lineFrom(descriptor, size, first + Math.floor(((end - first) * i) / count));
      if (line && line.start < end) found.set(line.start, line.heartbeat);
    }
    return [...found].sort(([a], [b]) => a - b).map(([, heartbeat]) => heartbeat);
  });
  return sample ?? [];
}

/** Where the first heartbeat of that time or later begins; the size of the file if no such heartbeat exists. */
function firstAtOrAfter(descriptor: number, size: number, time: number): number {
  let [low, high] = [0, size];
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    const line = lineFrom(descriptor, size, middle);
    if (!line || line.start >= high) {
      // No whole line between middle and high: the answer is high, or a line that begins before middle.
      high = middle;
      continue;
    }
    if (line.heartbeat.ts < time) low = line.start + 1;
    else high = middle;
  }
  return lineFrom(descriptor, size, low)?.start ?? size;
}

/** The first whole heartbeat that begins at `position` or later. */
function lineFrom(descriptor: number, size: number, position: number): Found | undefined {
  // One byte earlier: a line that begins exactly here is preceded by a newline.
  const begin = Math.max(0, position - 1);
  for (const bytes of WINDOW_BYTES) {
    const window = new Uint8Array(Math.min(bytes, size - begin));
    const content = window.subarray(0, readFully(descriptor, window, begin));
    let start = position === 0 ? 0 : content.indexOf(NEWLINE) + 1;
    if (start === 0 && position > 0) continue;
    let cost = 0;
    for (;;) {
      const end = content.indexOf(NEWLINE, start);
      if (end < 0) break;
      if (content[start] === BRACE && end - start <= MAX_LINE_BYTES) {
        const heartbeat = parseHeartbeat(new TextDecoder().decode(content.subarray(start, end)));
        if (heartbeat) return { heartbeat, start: begin + start };
        cost += end - start;
      }
      cost += LINE_COST;
      if (cost > GARBAGE_COST) return undefined;
      start = end + 1;
    }
    if (begin + content.length >= size) return undefined;
  }
  return undefined;
}
