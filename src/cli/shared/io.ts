/** The streams, colours and exit code of a command. They are parameters, so that tests run commands in their process. */
import { fstatSync } from 'node:fs';
import type { Environment } from '../../environment.js';
import { LiveLine } from '../../live-line.js';
import { toJson } from '../../run/json.js';
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
    out: (line) => void stdout.write(`${line}\n`),
    warn: (text) => err(`${yellow('warning:')} ${text}`),
    style: stylesFor(stdout, env),
    width: (stdout.isTTY && stdout.columns) || DEFAULT_WIDTH,
  };
}

export function processIo(): Io {
  for (const stream of [process.stdout, process.stderr]) stream.on('error', ignoreClosedPipe);
  return createIo(process.stdout, process.stderr, process.env);
}

/**
 * `trefoil … | head` closes the pipe (EPIPE), a lost connection the terminal (EIO). The command continues: a training run
 * must not end with the reader of its log.
 */
export function ignoreClosedPipe(error: NodeJS.ErrnoException): void {
  if (error.code !== 'EPIPE' && error.code !== 'EIO') throw error;
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
