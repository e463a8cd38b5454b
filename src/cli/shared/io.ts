/** The streams, colours and exit code of a command. They are parameters, so that tests run commands in their process. */
import { closeSync, fstatSync, openSync } from 'node:fs';
import { isatty } from 'node:tty';
import type { Environment } from '../../environment.js';
import { explainFileError, isDiskError } from '../../files.js';
import { LiveLine } from '../../live-line.js';
import { toJson } from '../../run/json.js';
import { visible } from '../../text.js';
import { DEFAULT_WIDTH } from './table.js';

export type Stream = NodeJS.WritableStream & { readonly isTTY?: boolean; readonly columns?: number };

export interface Io {
  readonly env: Environment;
  /** Results. With `--json` exactly one JSON value. */
  readonly stdout: Stream;
  /** Everything else: warnings, progress, hints. */
  readonly stderr: Stream;
  /** Writes a line to stdout. */
  readonly out: (line: string) => void;
  /** Writes a line to stderr. */
  readonly err: (line: string) => void;
  /** Writes `warning: text` to stderr. */
  readonly warn: (text: string) => void;
  /** Colours for stdout. */
  readonly style: Styles;
  /** Columns of stdout. Tables are wrapped to fit. */
  readonly width: number;
  /** Exit code of the process. A command sets it when it did its work and the result is negative. */
  exitCode: number;
  /** Writes to stdout that a full disk refused. They cost the command its exit code 0, unless stdout is a log. */
  lost: number;
  /** Whether stdout is the log of work whose result is elsewhere, such as the folder of a run. A command sets it. */
  isLog: boolean;
}

export function createIo(stdout: Stream, stderr: Stream, env: Environment): Io {
  const { yellow } = stylesFor(stderr, env);
  const err = (line: string) => void stderr.write(`${line}\n`);
  return {
    env,
    stdout,
    stderr,
    err,
    exitCode: 0,
    lost: 0,
    isLog: false,
    out: (line) => void stdout.write(`${line}\n`),
    warn: (text) => err(`${yellow('warning:')} ${visible(text)}`),
    style: stylesFor(stdout, env),
    width: (stdout.isTTY && stdout.columns) || DEFAULT_WIDTH,
  };
}

export function processIo(): Io {
  const io = createIo(process.stdout, process.stderr, process.env);
  process.stdout.on('error', (error) => countLost(error, io));
  process.stderr.on('error', ignoreClosedReader);
  const terminals = [0, 1, 2].filter((descriptor) => isatty(descriptor));
  process.on('exit', () => releaseClosed(terminals));
  return io;
}

/**
 * The command continues where its output cannot be written: a training run must not end with the reader of its log, nor
 * with the disk that its log is on. The stream tries again with the next write.
 */
export function countLost(error: NodeJS.ErrnoException, io: Io): void {
  if (hasNoReader(error)) return;
  if (!isDiskError(error)) throw error;
  if (io.lost === 0) io.warn(`stdout: ${explainFileError(error)}; the command goes on, and this output is lost`);
  io.lost += 1;
}

/** `trefoil … | head` closes the pipe (EPIPE), a lost connection the terminal (EIO). */
function hasNoReader({ code }: NodeJS.ErrnoException): boolean {
  return code === 'EPIPE' || code === 'EIO';
}

/** Warnings have no other place to be reported at. */
function ignoreClosedReader(error: NodeJS.ErrnoException): void {
  if (!hasNoReader(error) && !isDiskError(error)) throw error;
}

/**
 * At its end Node restores the settings of the terminals it was started on, and aborts (SIGABRT) if one of them was closed.
 * It leaves out descriptors that are another file by now.
 */
function releaseClosed(terminals: readonly number[]): void {
  for (const descriptor of terminals) {
    if (isatty(descriptor)) continue;
    closeSync(descriptor);
    openSync('/dev/null', 'r+'); // takes the number that was closed: the lowest that is free
  }
}

/**
 * Whether the stream is a pipe. Its reader may print to the terminal, as tee does, and what is rewritten in place there
 * would then be mixed with its lines.
 */
export function isPipe(stream: Stream): boolean {
  const { fd } = stream as { readonly fd?: number };
  if (fd === undefined) return false;
  const facts = fstatSync(fd);
  return facts.isFIFO() || facts.isSocket();
}

export function printJson(io: Io, value: unknown): void {
  io.out(toJson(value, 2));
}

/** Lets signal handlers run. Kernels block the event loop, so a command calls this between its units of work. */
export function yieldToSignals(): Promise<void> {
  return new Promise((resolve) => setImmediate(resolve));
}

/** Functions that add colour to a text, or return it unchanged where colour is off. */
export interface Styles {
  readonly bold: (text: string) => string;
  readonly dim: (text: string) => string;
  readonly red: (text: string) => string;
  readonly green: (text: string) => string;
  readonly yellow: (text: string) => string;
}

/**
 * Whether to write colour codes. FORCE_COLOR decides if it is set ("0" and "false" turn colour off); else a non-empty
 * NO_COLOR and TERM=dumb turn it off; else colour is used on terminals only.
 */
function usesColour(stream: { readonly isTTY?: boolean }, env: Environment): boolean {
  const force = env['FORCE_COLOR'];
  if (force !== undefined) return force !== '0' && force !== 'false';
  if (env['NO_COLOR'] || env['TERM'] === 'dumb') return false;
  return stream.isTTY === true;
}

export function stylesFor(stream: { readonly isTTY?: boolean }, env: Environment): Styles {
  const isOn = usesColour(stream, env);
  const style = (open: number, close: number) => (text: string) => (isOn ? `\x1b[${open}m${text}\x1b[${close}m` : text);
  return {
    bold: style(1, 22),
    dim: style(2, 22),
    red: style(31, 39),
    green: style(32, 39),
    yellow: style(33, 39),
  };
}

/** Progress on stderr: one line that is rewritten in place on a terminal, elsewhere a line every ten seconds. */
export class ProgressLine extends LiveLine {
  constructor(io: Io) {
    super(io.stderr, { everyMs: 10_000 });
  }
}

const WAIT_SHOWN_AFTER_MS = 2000;

/** Awaits `work`; if it takes longer than two seconds, progress tells for how long it has been waited for. */
export async function whileWaiting<Result>(io: Io, text: string, work: Promise<Result>): Promise<Result> {
  const progress = new ProgressLine(io);
  const started = performance.now();
  const timer = setInterval(() => {
    progress.show(`${text}: ${Math.round((performance.now() - started) / 1000)} s`);
  }, WAIT_SHOWN_AFTER_MS);
  try {
    return await work;
  } finally {
    clearInterval(timer);
    if (performance.now() - started >= WAIT_SHOWN_AFTER_MS) progress.clear();
  }
}
