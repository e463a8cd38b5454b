#!/usr/bin/env node
/** The executable. Everything is in program.ts, where tests can reach it. */
import { processIo } from './io.js';
import { main } from './program.js';

// No process.exit: what was printed into a pipe would be cut off.
process.exitCode = await main(process.argv.slice(2), processIo());
