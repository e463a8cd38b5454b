/** Ends the process on a signal from native code: while a kernel runs, handlers in JavaScript do not. */
import { constants } from 'node:os';
import { fileURLToPath } from 'node:url';
import koffi from 'koffi';
import { type CompilerOptions, KernelCompiler } from './compile.js';

export type EndingSignal = 'SIGINT' | 'SIGTERM';

/**
 * Until the returned function is called, each named signal writes its text (at most 127 bytes) to stderr and then has its
 * default action. The library is that of the CPU device, compiled on first use.
 */
export function endOnSignals(texts: Readonly<Record<EndingSignal, string>>, options: CompilerOptions): () => void {
  const runtime = fileURLToPath(new URL('runtime.cpp', import.meta.url));
  const library = koffi.load(new KernelCompiler(options).library(runtime));
  const set = library.func('trefoil_end_on_signal', 'void', ['int', 'const char *']);
  const names = Object.keys(texts) as EndingSignal[];
  for (const name of names) set(constants.signals[name], texts[name]);
  return () => {
    for (const name of names) set(constants.signals[name], '');
  };
}
