/** Work that blocks the event loop for long: kernels, and loops over them. */
import { isMainThread } from 'node:worker_threads';
import { defaultCompilerOptions } from '../../device/cpu/compile.js';
import { endOnSignals } from '../../device/cpu/end-on-signals.js';
import { UsageError } from '../../errors.js';
import { CompileProgressLine } from './compile-progress.js';

/** The line of a command that Ctrl-C ended. It first clears a progress line. */
export function endLine(text: string): string {
  return `${process.stderr.isTTY ? '\r\x1b[K' : ''}trefoil: ${text}\n`;
}

/**
 * Runs `work`, during which handlers in JavaScript cannot run. Meanwhile SIGINT and SIGTERM print one line and end the
 * process at once, whatever it is doing: work that writes files does not belong here.
 */
export function runBlocking<Result>(work: () => Result): Result {
  const handlers = process.listeners('SIGINT');
  process.removeAllListeners('SIGINT');
  const restore = endQuickly();
  try {
    return work();
  } finally {
    restore();
    for (const handler of handlers) process.on('SIGINT', handler);
  }
}

function endQuickly(): () => void {
  if (!isMainThread) return () => {}; // signals belong to the main thread
  const options = { ...defaultCompilerOptions(process.env), progress: new CompileProgressLine(process.stderr) };
  try {
    return endOnSignals({ SIGINT: endLine('interrupted'), SIGTERM: endLine('ended by SIGTERM') }, options);
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    return () => {}; // without a compiler the default action ends the process as fast, without a line
  }
}
