/** Runs the command line inside a test. */
import { Writable } from 'node:stream';
import type { CommandEntry } from '../commands.js';
import { main } from '../program.js';
import { createIo, type Stream } from '../shared/io.js';

export interface Outcome {
  readonly code: number;
  readonly stdout: string;
  readonly stderr: string;
}

class Sink extends Writable {
  text = '';
  override _write(chunk: Buffer, _encoding: string, done: () => void): void {
    this.text += chunk.toString();
    done();
  }
}

export interface RunOptions {
  readonly env?: Record<string, string>;
  /** Make stderr look like a terminal. */
  readonly terminal?: boolean;
  readonly commands?: readonly CommandEntry[];
}

export async function runCli(
  argv: readonly string[],
  { env = {}, terminal = false, commands }: RunOptions = {},
): Promise<Outcome> {
  const [stdout, stderr] = [new Sink(), new Sink()];
  const io = createIo(stdout, Object.assign(stderr, { isTTY: terminal }) as Stream, env);
  const code = await main(argv, io, commands);
  return { code, stdout: stdout.text, stderr: stderr.text };
}
