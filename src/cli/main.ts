#!/usr/bin/env node
import { main } from './program.js';
/** The executable. Everything is in program.ts, where tests can reach it. */
import { processIo } from './shared/io.js';

// No process.exit: what was printed into a pipe would be cut off.
process.exitCode = await main(process.argv.slice(2), processIo());
