/** Where a command prints and how it ends: handed in, so that tests run commands in their own process. */
import { toJson } from '../../run/json.js';

export type Stream = NodeJS.WritableStream & { readonly isTTY?: boolean };

export interface Io {
  readonly env: Readonly<Record<string, string | undefined>>;
  /** Results. With `--json` exactly one JSON value. */
  readonly stdout: Stream;
  /** Everything else. */
  readonly stderr: Stream;
  /** One line on stdout, and one on stderr. */
  readonly out: (line: string) => void;
  readonly err: (line: string) => void;
  /** What the process will end with; commands change it when they did their work and the news is bad. */
  exitCode: number;
}

export function createIo(stdout: Stream, stderr: Stream, env: Io['env']): Io {
  return {
    ...{ env, stdout, stderr, exitCode: 0 },
    out: (line) => void stdout.write(`${line}\n`),
    err: (line) => void stderr.write(`${line}\n`),
  };
}

export function processIo(): Io {
  for (const stream of [process.stdout, process.stderr]) stream.on('error', ignoreClosedPipe);
  return createIo(process.stdout, process.stderr, process.env);
}

/** `trefoil … | head` closes the pipe: the reader has what it wanted, and the work (a training, say) goes on. */
export function ignoreClosedPipe(error: NodeJS.ErrnoException): void {
  if (error.code !== 'EPIPE') throw error;
}

export function printJson(io: Io, value: unknown): void {
  io.out(toJson(value, 2));
}

const TERMINAL_WIDTH = 80;

/** One line on a terminal that is written over and over, and nothing at all elsewhere. */
export class ProgressLine {
  readonly #stream: Stream;

  constructor(io: Io) {
    this.#stream = io.stderr;
  }

  show(text: string): void {
    const { columns = TERMINAL_WIDTH } = this.#stream as { columns?: number };
    if (this.#stream.isTTY) this.#stream.write(`\r\x1b[K${text.slice(0, columns - 1)}`);
  }

  clear(): void {
    if (this.#stream.isTTY) this.#stream.write('\r\x1b[K');
  }
}
