/** Errors of a worker thread, as messages. */

import { TrefoilError } from '../../errors.js';

export interface Failure {
  readonly kind: 'failed';
  readonly message: string;
  /** Null for an unexpected error. */
  readonly exitCode: number | null;
  readonly name: string;
  readonly stack: string;
}

export function describeFailure(error: unknown): Failure {
  const { message, stack, exitCode, name } = error as Error & { exitCode?: number };
  return { kind: 'failed', message: message ?? String(error), exitCode: exitCode ?? null, name, stack: stack ?? '' };
}

/** The error of another thread. Expected errors keep their message and code; others are marked as internal. */
export function failureOf({ message, exitCode, stack }: Failure): TrefoilError {
  const cause = new Error(message);
  cause.stack = stack;
  if (exitCode !== null) return new TrefoilError(message, exitCode, { cause });
  return new TrefoilError(`internal error in a data worker: ${message}`, undefined, { cause });
}
