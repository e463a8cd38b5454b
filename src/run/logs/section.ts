/**
 * .section_rank{r}: what a rank is doing at this moment, so that a watchdog can name where it hangs. One line of fixed
 * length, overwritten in place with one call and never fsynced. A heartbeat cannot show this, because it is written after
 * the step.
 */
import { closeSync, constants, openSync, rmSync, writeSync } from 'node:fs';
import { UsageError } from '../../errors.js';
import { explainFileError, fileError, readText, statOrUndefined } from '../../files.js';
import { isPlainObject } from '../json.js';
import type { RecordSink } from './log-file.js';
import type { LogThread } from './log-thread.js';

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

/** A file with one record, which each write replaces. */
export class InPlaceFile implements RecordSink {
  readonly drops = 0;
  readonly #path: string;
  readonly #descriptor: number;
  readonly #onProblem: (message: string) => void;
  #isFailing = false;

  constructor(path: string, descriptor: number, onProblem: (message: string) => void) {
    this.#path = path;
    this.#descriptor = descriptor;
    this.#onProblem = onProblem;
  }

  write(record: Uint8Array): void {
    try {
      writeSync(this.#descriptor, record, 0, record.length, 0);
      this.#isFailing = false;
    } catch (error) {
      if (!this.#isFailing)
        this.#onProblem(`${this.#path}: cannot write: ${explainFileError(error)}; training goes on`);
      this.#isFailing = true;
    }
  }

  flush(): boolean {
    return !this.#isFailing;
  }

  /** Also removes the file: a run that has ended is in no section. */
  close(): void {
    closeSync(this.#descriptor);
    rmSync(this.#path, { force: true });
  }
}

export interface SectionOptions {
  /** Milliseconds since 1970. */
  readonly clock?: () => number;
  readonly onProblem?: (message: string) => void;
  /** Takes over the writing; by default the file is written on this thread. */
  readonly logThread?: LogThread | undefined;
}

export class SectionWriter {
  readonly #rank: number;
  readonly #file: RecordSink;
  readonly #clock: () => number;

  constructor(path: string, rank: number, options: SectionOptions = {}) {
    this.#rank = rank;
    this.#clock = options.clock ?? Date.now;
    const facts = statOrUndefined(path);
    if (facts && !facts.isFile()) throw new UsageError(`${path}: is not a regular file; remove it`);
    let descriptor: number;
    try {
      descriptor = openSync(path, constants.O_WRONLY | constants.O_CREAT | constants.O_TRUNC, 0o644);
    } catch (error) {
      throw fileError('open', path, error);
    }
    this.#file =
      options.logThread?.open('replace', { path, descriptor }) ??
      new InPlaceFile(path, descriptor, options.onProblem ?? (() => {}));
  }

  /** Never throws: if the disk refuses the record, only the name of the section is lost. */
  enter(section: SectionName, step: number): void {
    const record = { ts: this.#clock() / 1000, pid: process.pid, rank: this.#rank, step, section };
    this.#file.write(Buffer.from(`${JSON.stringify(record).padEnd(RECORD_BYTES - 1)}\n`));
  }

  close(): void {
    this.#file.close();
  }
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

function parseSection(text: string): Section | undefined {
  let parsed: unknown;
  try {
    parsed = JSON.parse(text);
  } catch {
    return undefined; // An incomplete line: it is being written, or the disk was full.
  }
  if (!isPlainObject(parsed) || typeof parsed['section'] !== 'string') return undefined;
  const isWhole = ['ts', 'pid', 'rank', 'step'].every((name) => Number.isFinite(parsed[name]));
  return isWhole ? (parsed as unknown as Section) : undefined;
}
