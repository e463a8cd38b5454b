/** Ends the process on a signal from native code: while a kernel runs, handlers in JavaScript do not. */
import { constants } from 'node:os';
import { join } from 'node:path';
import koffi from '../koffi.js';
import type { KernelCompiler } from './compile.js';
import { CPU_FOLDER } from './sources.js';

export type EndingSignal = 'SIGINT' | 'SIGTERM';

/**
 * Returns a function that installs: until the function that it returns is called, each named signal writes its text (at
 * most 127 bytes) to stderr and then has its default action. The library is that of the CPU device, compiled on first use;
 * installing itself takes microseconds.
 */
export function endOnSignals(
  texts: Readonly<Record<EndingSignal, string>>,
  compiler: KernelCompiler,
): () => () => void {
  const set = runtime(compiler).func('trefoil_end_on_signal', 'void', ['int', 'const char *']);
  const names = Object.keys(texts) as EndingSignal[];
  return () => {
    for (const name of names) set(constants.signals[name], texts[name]);
    return () => {
      for (const name of names) set(constants.signals[name], '');
    };
  };
}

/**
 * Gives the process `seconds` to end after SIGINT or SIGTERM, whatever its threads do; then it writes `line` to stderr and
 * ends with code 0. Handlers in JavaScript must be there before.
 */
export function endWithin(seconds: number, line: string, compiler: KernelCompiler): void {
  const set = runtime(compiler).func('trefoil_end_within', 'void', ['int', 'int', 'const char *']);
  for (const name of ['SIGINT', 'SIGTERM'] as const) set(constants.signals[name], seconds, line);
}

function runtime(compiler: KernelCompiler): ReturnType<typeof koffi.load> {
  return koffi.load(compiler.library(join(CPU_FOLDER, 'runtime.cpp')));
}
