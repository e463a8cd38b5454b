/** A thread of `CudaCompiler.compileAll`: compiles one file at a time, and posts its code or why there is none. */
import { parentPort } from 'node:worker_threads';
import { TrefoilError } from '../../errors.js';
import { type CompileAnswer, type CompileTask, findBackend } from './compile.js';

const backend = findBackend();

parentPort!.on('message', ({ source, flags }: CompileTask) => parentPort!.postMessage(answer(source, flags)));

function answer(source: string, flags: readonly string[]): CompileAnswer {
  try {
    return { code: backend.compile(source, flags) };
  } catch (error) {
    if (!(error instanceof TrefoilError)) throw error;
    return { message: error.message, exitCode: error.exitCode };
  }
}
