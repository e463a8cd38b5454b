/** Errors a user can act on: one line that names the field or file and the remedy. The CLI prints the message, never a stack. */

/** Exit codes of every command (docs/reference/cli.md). */
export const ExitCode = {
  done: 0,
  failed: 1,
  usage: 2,
  halted: 3,
  signalled: 4,
  nonFinite: 5,
  dataSource: 6,
} as const;

/** An expected failure: the message is all a person needs. */
export class TrefoilError extends Error {
  readonly exitCode: number;

  constructor(message: string, exitCode: number = ExitCode.failed, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
    this.exitCode = exitCode;
  }
}

/** Bad usage, config, file or machine: nothing was created, and the message says what to change. */
export class UsageError extends TrefoilError {
  constructor(message: string, options?: ErrorOptions) {
    super(message, ExitCode.usage, options);
  }
}
