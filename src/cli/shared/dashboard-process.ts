/** The dashboard as a process of its own beside a training: the trainer serves no requests. */
import { type ChildProcess, spawn } from 'node:child_process';
import type { Socket } from 'node:net';
import { dirname } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';

import { shellQuote } from '../../text.js';
import type { Io } from './io.js';

/** Runs `work` while the dashboard serves the folder of the run; prints its address, and at the end how to see the run again. */
export async function withDashboard<Result>(
  isWanted: boolean,
  outDir: string,
  say: (line: string) => void,
  io: Io,
  work: () => Promise<Result>,
): Promise<Result> {
  if (!isWanted) return await work();
  const dir = dirname(outDir);
  const child = startDashboardProcess(dir, say, io);
  try {
    return await work();
  } finally {
    child.kill('SIGTERM');
    say(`the dashboard has ended; see the run again with: npx trefoil dashboard --dir ${shellQuote(dir)}`);
  }
}

function startDashboardProcess(dir: string, say: (line: string) => void, io: Io): ChildProcess {
  const main = fileURLToPath(new URL('../main.js', import.meta.url));
  // Its own process group would survive a Ctrl-C of the training; in this one both receive the signal.
  const child = spawn(process.execPath, [main, 'dashboard', '--dir', dir, '--port', '0'], {
    // The channel closes with this process, however it ends, and the dashboard ends with it.
    stdio: ['ignore', 'pipe', 'pipe', 'ipc'],
  });
  child.on('error', (error) => io.warn(`the dashboard did not start: ${error.message}`));
  createInterface({ input: child.stdout! }).on('line', (line) => {
    const url = /^listening on (.*)$/.exec(line)?.[1];
    say(url === undefined ? line : `dashboard: ${url}`);
  });
  createInterface({ input: child.stderr! }).on('line', (line) => io.warn(`dashboard: ${line}`));
  // A training that ends does not wait for it, nor for its pipes.
  child.unref();
  for (const handle of [child.channel, child.stdout, child.stderr]) (handle as Socket | null)?.unref();
  return child;
}
