/** A worker thread of `CudaCompiler.compileAll`: compiles one file per message, and posts the cubin or the error. */
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
