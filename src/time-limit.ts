/**
 * A limit of time for functions that run programs or expressions of strangers, in the thread that calls them: loops and
 * regular expressions that backtrack are interrupted. What it costs, a tenth of a millisecond, is too much for every word.
 */
import { createContext, Script } from 'node:vm';

const script = new Script('work()');
let context: { work: (() => unknown) | null } | null = null;

/** The result of `work`, or what `late` returns if it takes longer. */
export function withTimeLimit<Result>(milliseconds: number, work: () => Result, late: () => Result): Result {
  context ??= createContext({ work: null }) as { work: (() => unknown) | null };
  const outer = context.work;
  context.work = work;
  try {
    return script.runInContext(context, { timeout: Math.ceil(milliseconds) }) as Result;
  } catch (error) {
    if ((error as { code?: unknown } | null)?.code === 'ERR_SCRIPT_EXECUTION_TIMEOUT') return late();
    throw error;
  } finally {
    context.work = outer;
  }
}
