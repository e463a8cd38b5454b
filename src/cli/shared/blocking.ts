/** Work that blocks the event loop for long: kernels, and loops over them. */
import { isMainThread } from 'node:worker_threads';
import { defaultCompilerOptions, type KernelCompiler } from '../../device/cpu/compile.js';
import { endWithin as endOnDeadline, endOnSignals } from '../../device/cpu/end-on-signals.js';
import { chooseKernels } from '../../device/kernel-choice.js';
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
  const install = endQuickly();
  const handlers = process.listeners('SIGINT');
  process.removeAllListeners('SIGINT'); // from here to `install()` a signal would end the process without a line
  const restore = install();
  try {
    return work();
  } finally {
    restore();
    for (const handler of handlers) process.on('SIGINT', handler);
  }
}

/** After SIGINT or SIGTERM the process has `seconds` to end; then it prints `line` and ends, whatever its threads do. */
export function endWithin(seconds: number, line: string): void {
  fromNative((compiler) => endOnDeadline(seconds, line, compiler));
}

function endQuickly(): () => () => void {
  if (!isMainThread) return () => () => {}; // signals belong to the main thread
  const texts = { SIGINT: endLine('interrupted'), SIGTERM: endLine('ended by SIGTERM') };
  // Without native code the default action ends the process as fast, without a line.
  return fromNative((compiler) => endOnSignals(texts, compiler)) ?? (() => () => {});
}

/** Null without native kernels. */
function fromNative<Result>(work: (compiler: KernelCompiler) => Result): Result | null {
  const options = { ...defaultCompilerOptions(process.env), progress: new CompileProgressLine(process.stderr) };
  const { kind, compiler } = chooseKernels(process.env, options);
  if (kind === 'wasm') return null;
  try {
    return work(compiler);
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    return null;
  }
}
