#!/usr/bin/env node
/** The executable. Everything else is in program.ts, where tests can call it. */
import { main } from './program.js';
import { endLine } from './shared/blocking.js';
import { processIo } from './shared/io.js';

process.on('SIGINT', () => {
  // Commands that stop in order (train, launch, watch) have a handler of their own.
  if (process.listenerCount('SIGINT') > 1) return;
  process.stderr.write(endLine('interrupted'));
  process.removeAllListeners('SIGINT');
  process.kill(process.pid, 'SIGINT'); // so that the shell sees an interrupted process, exit code 130
});

// No process.exit: it would cut off output that is still being written to a pipe.
process.exitCode = await main(process.argv.slice(2), processIo());
