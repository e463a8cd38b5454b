#!/usr/bin/env node
import { ExitCode } from '../errors.js';
import { plural } from '../text.js';
/** The executable. Everything else is in program.ts, where tests can call it. */
import { main } from './program.js';
import { endLine } from './shared/blocking.js';
import { processIo, yieldToSignals } from './shared/io.js';

process.on('SIGINT', () => {
  // Commands that stop in order (train, launch, watch) have a handler of their own.
  if (process.listenerCount('SIGINT') > 1) return;
  process.stderr.write(endLine('interrupted'));
  process.removeAllListeners('SIGINT');
  process.kill(process.pid, 'SIGINT'); // so that the shell sees an interrupted process, exit code 130
});

// No process.exit: it would cut off output that is still being written to a pipe.
const io = processIo();
const code = await main(process.argv.slice(2), io);
await yieldToSignals(); // errors of the last writes arrive
if (io.lost > 0) io.warn(`stdout: ${plural(io.lost, 'write')} did not fit on the disk`);
process.exitCode = io.lost > 0 && !io.isLog && code === ExitCode.done ? ExitCode.failed : code;
