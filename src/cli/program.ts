/** The program `trefoil`: finds the command, runs it, and turns whatever happens into one line and an exit code. */
import { Command, CommanderError } from 'commander';
import { ExitCode, TrefoilError } from '../errors.js';
import { trefoilVersion } from '../run/version.js';
import { addCommands, type CommandEntry } from './command.js';
import { COMMANDS } from './commands.js';
import type { Io } from './shared/io.js';

/** Runs the command line `argv` (without node and script) and returns the exit code. Never throws, never exits. */
export async function main(
  argv: readonly string[],
  io: Io,
  commands: readonly CommandEntry[] = COMMANDS,
): Promise<number> {
  try {
    const program = new Command('trefoil')
      .description('Train, check, run and watch long-context language models with Native Sparse Attention')
      .version(trefoilVersion(), '-V, --version', 'print the version')
      .helpOption('-h, --help', 'print this help')
      .helpCommand(false)
      .enablePositionalOptions() // what stands after a command's name is the command's
      .exitOverride()
      .configureOutput({
        writeOut: (text) => void io.stdout.write(text),
        writeErr: (text) => void io.stderr.write(text),
        outputError: () => {}, // printed below, on one line
      });
    const words = argv[0] === 'help' ? [...argv.slice(1), '--help'] : [...argv];
    await addCommands(program, commands, words, io);
    await program.parseAsync(words, { from: 'user' });
    return io.exitCode;
  } catch (error) {
    return report(error, io);
  }
}

function report(error: unknown, io: Io): number {
  if (error instanceof CommanderError) {
    if (error.exitCode === 0) return ExitCode.done; // --help, --version
    // Without a command commander has printed the help already.
    if (error.code !== 'commander.help') io.err(`trefoil: ${usageLine(error.message)}`);
    return ExitCode.usage;
  }
  const isExpected = error instanceof TrefoilError;
  const message = error instanceof Error ? error.message : String(error);
  if (isExpected) io.err(`trefoil: ${message}`);
  else io.err(`trefoil: internal error: ${message.split('\n')[0]}; set TREFOIL_DEBUG=1 for the stack`);
  if (io.env['TREFOIL_DEBUG'] && error instanceof Error) io.err(error.stack ?? '');
  return isExpected ? error.exitCode : ExitCode.failed;
}

/** "error: unknown option '--ful'\n(Did you mean --full?)" on one line, in our words. */
function usageLine(message: string): string {
  return message
    .replace(/^error: /, '')
    .replace(/\s*\n\s*/g, ' ')
    .replace('(Did you mean', '(did you mean');
}
