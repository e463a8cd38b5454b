/**
 * .section_rank{r}: what a rank is doing at this moment, so that a watchdog can name where it hangs. One line of fixed
 * length, written over in place with one call and never flushed: a few microseconds a step, and no growth. A heartbeat
 * cannot say this, since it is written when a step is over.
 */
import { closeSync, constants, openSync, readFileSync, rmSync, writeSync } from 'node:fs';
import { UsageError } from '../errors.js';
import { errorCode, explainFileError, fileError, statOrUndefined } from './atomic.js';
import { isPlainObject } from './json.js';

/** Everything a run may hang in. `between` is where signals and .HALT are looked at; `wait` is for other ranks. */
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
/** A reader may come while the line is being replaced; the next look then sees it whole. */
const READ_ATTEMPTS = 3;

export class SectionWriter {
  readonly path: string;
  readonly #rank: number;
  readonly #descriptor: number;
  readonly #clock: () => number;
  readonly #onProblem: (message: string) => void;
  #failing = false;

  constructor(
    path: string,
    rank: number,
    options: { clock?: () => number; onProblem?: (message: string) => void } = {},
  ) {
    this.path = path;
    this.#rank = rank;
    this.#clock = options.clock ?? Date.now;
    this.#onProblem = options.onProblem ?? (() => {});
    const facts = statOrUndefined(path);
    if (facts && !facts.isFile()) throw new UsageError(`${path}: is not a regular file; remove it`);
    try {
      this.#descriptor = openSync(path, constants.O_WRONLY | constants.O_CREAT | constants.O_TRUNC, 0o644);
    } catch (error) {
      throw fileError('open', path, error);
    }
  }

  /** Never throws: a disk that refuses this costs the name of a section, not the training. */
  enter(section: SectionName, step: number): void {
    const record = { ts: this.#clock() / 1000, pid: process.pid, rank: this.#rank, step, section };
    try {
      writeSync(this.#descriptor, `${JSON.stringify(record).padEnd(RECORD_BYTES - 1)}\n`, 0);
      this.#failing = false;
    } catch (error) {
      if (!this.#failing) this.#onProblem(`${this.path}: cannot write: ${explainFileError(error)}; training goes on`);
      this.#failing = true;
    }
  }

  /** A run that ended is in no section: the file goes. */
  close(): void {
    closeSync(this.#descriptor);
    rmSync(this.path, { force: true });
  }
}

/** The section a rank is in, or undefined: no file, or nothing whole in it. */
export function readSection(path: string): Section | undefined {
  for (let attempt = 0; attempt < READ_ATTEMPTS; attempt++) {
    let text: string;
    try {
      text = readFileSync(path, 'utf8');
    } catch (error) {
      if (errorCode(error) === 'ENOENT') return undefined;
      throw fileError('read', path, error);
    }
    const section = parseSection(text);
    if (section) return section;
  }
  return undefined;
}

function parseSection(text: string): Section | undefined {
  let parsed: unknown;
  try {
    parsed = JSON.parse(text);
  } catch {
    return undefined; // Half of a line: the writer was in the middle of it, or the disk was full.
  }
  if (!isPlainObject(parsed) || typeof parsed['section'] !== 'string') return undefined;
  const isWhole = ['ts', 'pid', 'rank', 'step'].every((name) => Number.isFinite(parsed[name]));
  return isWhole ? (parsed as unknown as Section) : undefined;
}
