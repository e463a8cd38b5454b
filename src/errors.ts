/** Errors a user can act on: one line that names the field or file and the remedy. The CLI prints the message, never a stack. */

import { visible } from './text.js';

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

const MESSAGE_CHARACTERS = 2000;
/** The end of a message is its remedy. */
const REMEDY_CHARACTERS = 500;

/** Messages name things of files and networks: such a name must not steer the terminal, nor fill it. */
function printable(message: string): string {
  if (message.length <= MESSAGE_CHARACTERS) return visible(message);
  return visible(`${message.slice(0, MESSAGE_CHARACTERS - REMEDY_CHARACTERS)}…${message.slice(-REMEDY_CHARACTERS)}`);
}

/** An expected failure: the message is all a person needs. */
export class TrefoilError extends Error {
  readonly exitCode: number;

  constructor(message: string, exitCode: number = ExitCode.failed, options?: ErrorOptions) {
    super(printable(message), options);
    this.name = new.target.name;
    this.exitCode = exitCode;
  }
}

/** Memory of the host or of a device could not be allocated. The message has the numbers and the remedy. */
export class OutOfMemory extends TrefoilError {}

/** Bad usage, config, file or machine: nothing was created, and the message says what to change. */
export class UsageError extends TrefoilError {
  constructor(message: string, options?: ErrorOptions) {
    super(message, ExitCode.usage, options);
  }
}
