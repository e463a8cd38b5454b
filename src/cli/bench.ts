/** `trefoil bench`: the benches, each a file of its own. */
import type { Command } from 'commander';
import { addCommands } from './command.js';
import { BENCHES } from './commands.js';
import type { Io } from './shared/io.js';

export async function configure(command: Command, io: Io, rest: readonly string[]): Promise<void> {
  await addCommands(command, BENCHES, rest, io);
}
