/**
 * A limit of time for functions that run programs or expressions of strangers, in the thread that calls them: loops and
 * regular expressions that backtrack are interrupted. What it costs, a tenth of a millisecond, is too much for every word.
 */
import { readFileSync } from 'node:fs';
import { createContext, Script } from 'node:vm';

const script = new Script('work()');
let context: { work: (() => unknown) | null } | null = null;

/** On a busy machine an honest function may take this many times as long by the clock. */
const MAX_WAITING = 64;

/**
 * The result of `work`, or what `late` returns if it takes longer. The limit is one of processor time: where the thread had to
 * wait for a processor, `work` is interrupted by the clock and begins again with more time, so it must not change anything.
 */
export function withTimeLimit<Result>(milliseconds: number, work: () => Result, late: () => Result): Result {
  context ??= createContext({ work: null }) as { work: (() => unknown) | null };
  const outer = context.work;
  context.work = work;
  try {
    for (let limit = Math.ceil(milliseconds); ; limit *= 2) {
      const before = threadMilliseconds();
      try {
        return script.runInContext(context, { timeout: limit }) as Result;
      } catch (error) {
        if ((error as { code?: unknown } | null)?.code !== 'ERR_SCRIPT_EXECUTION_TIMEOUT') throw error;
        const hadTime = threadMilliseconds() - before >= milliseconds / 2;
        if (hadTime || limit > MAX_WAITING * milliseconds) return late();
      }
    }
  } finally {
    context.work = outer;
  }
}

/** Processor time of this thread; where the system does not tell, the time of the clock. */
export function threadMilliseconds(): number {
  try {
    return Number(readFileSync('/proc/thread-self/schedstat', 'latin1').split(' ')[0]) / 1e6;
  } catch {
    return performance.now(); // not Linux
  }
}
