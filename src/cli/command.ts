/** How a command is registered: a line in a table now, its module only when it is asked for. */
import type { Command } from 'commander';
import type { Io } from './shared/io.js';

export interface CommandEntry {
  readonly name: string;
  /** One line for the list of commands. */
  readonly summary: string;
  load(): Promise<CommandModule>;
}

/** Declares options and an action on commander's command, or parses its own words. */
export type CommandModule = ConfiguredCommand | PlainCommand;

export interface ConfiguredCommand {
  /**
   * The action prints on `io`, throws a TrefoilError for what a user can mend, and sets `io.exitCode` where the work
   * was done but the answer is no. `rest` are the words after the command's name.
   */
  configure(command: Command, io: Io, rest: readonly string[]): void | Promise<void>;
}

export interface PlainCommand {
  /** Takes the words after the command's name, `--help` among them, and returns the exit code. */
  run(words: readonly string[], io: Io): Promise<number>;
}

/** Adds all entries to `parent`, and loads the one that `argv` names: `--help` of the others costs nothing. */
export async function addCommands(
  parent: Command,
  entries: readonly CommandEntry[],
  argv: readonly string[],
  io: Io,
): Promise<void> {
  const at = argv.findIndex((word) => !word.startsWith('-'));
  for (const { name, summary, load } of entries) {
    const command = parent.command(name).description(summary).helpCommand(false);
    if (name !== argv[at]) continue;
    const module = await load();
    if ('configure' in module) await module.configure(command, io, argv.slice(at + 1));
    else runPlain(command, module, io);
  }
}

/** All words go to the command as they are. */
function runPlain(command: Command, module: PlainCommand, io: Io): void {
  command
    .helpOption(false)
    .allowUnknownOption()
    .allowExcessArguments()
    .argument('[words...]')
    .action(async (_words, _options, self: Command) => {
      io.exitCode = await module.run(self.args, io);
    });
}
