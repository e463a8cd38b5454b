/** The program `trefoil`: runs a command, and turns an error into one line and an exit code. */
import { Command, CommanderError } from 'commander';
import { nearest } from '../config/suggest.js';
import { ExitCode, TrefoilError } from '../errors.js';
import { trefoilVersion } from '../run/version.js';
import { visible } from '../text.js';
import { COMMANDS, type CommandEntry } from './commands.js';
import { pullNamedModels } from './shared/hub-models.js';
import { type Io, stylesFor } from './shared/io.js';
import { DEFAULT_WIDTH } from './shared/table.js';

/** Runs the command line `argv` (without node and script) and returns the exit code. Never throws, never exits. */
export async function main(
  argv: readonly string[],
  io: Io,
  commands: readonly CommandEntry[] = COMMANDS,
): Promise<number> {
  try {
    const program = new Command('trefoil')
      .usage('<command> [options]')
      .description('Train, check, run and watch long-context language models with Native Sparse Attention.')
      .version(trefoilVersion(), '-V, --version', 'print the version')
      .helpOption('-h, --help', 'print this help')
      .helpCommand(false)
      .enablePositionalOptions() // options after a command's name belong to the command
      .exitOverride()
      .configureOutput({
        writeOut: (text) => void io.stdout.write(text),
        writeErr: (text) => void io.stderr.write(text),
        outputError: () => {}, // printed by `report`, on one line
        getOutHelpWidth: () => DEFAULT_WIDTH,
        getErrHelpWidth: () => DEFAULT_WIDTH,
        getOutHasColors: () => true, // `style` is the identity where colour is off
        getErrHasColors: () => true,
      })
      .configureHelp({ styleTitle: io.style.bold })
      .addHelpText('after', HELP)
      .hook('preAction', (_, command) => pullNamedModels(command, io));
    const args = argv[0] === 'help' ? [...argv.slice(1), '--help'] : [...argv];
    await addCommands(program, commands, args, io);
    await program.parseAsync(args, { from: 'user' });
    return io.exitCode;
  } catch (error) {
    return report(error, argv, commands, io);
  }
}

const HELP = `
New here? \`trefoil start\` trains a small model on this machine's CPU and shows
what it learned. Then train on your own text files:

  trefoil train --config text_cpu --local-path texts --out-dir artifacts/mine
  trefoil generate --model artifacts/mine --prompt "Once upon a time"

\`trefoil <command> --help\` lists the options of a command. Most commands take
--json and then print one JSON value on stdout, everything else on stderr.
Exit codes: 0 done, 1 failed, 2 bad usage or config, 3 halted by .HALT,
4 stopped by a signal after a checkpoint, 5 non-finite loss, 6 no data.
`;

/** Adds all entries to `parent`; imports the module of the one that `args` names, so that `--help` is fast. */
async function addCommands(
  parent: Command,
  entries: readonly CommandEntry[],
  args: readonly string[],
  io: Io,
): Promise<void> {
  const at = args.findIndex((word) => !word.startsWith('-'));
  for (const entry of entries) {
    const command = parent.command(entry.name).description(entry.summary).helpCommand(false);
    if (entry.heading) command.helpGroup(entry.heading);
    if ('commands' in entry) command.usage('<command> [options]');
    if (entry.name !== args[at]) continue;
    if ('commands' in entry) {
      await addCommands(command, entry.commands, args.slice(at + 1), io);
      continue;
    }
    (await entry.load()).configure(command, io);
  }
}

/** Prints an error in one line and returns its exit code. */
function report(error: unknown, argv: readonly string[], commands: readonly CommandEntry[], io: Io): number {
  const name = stylesFor(io.stderr, io.env).red('trefoil:');
  if (error instanceof CommanderError) {
    if (error.exitCode === 0) return ExitCode.done; // --help, --version
    // Without a command, commander has printed the help already.
    if (error.code !== 'commander.help') io.err(`${name} ${usageLine(error, argv, commands)}`);
    return ExitCode.usage;
  }
  const isExpected = error instanceof TrefoilError;
  const message = error instanceof Error ? error.message : String(error);
  if (isExpected) io.err(`${name} ${message}`);
  else
    io.err(
      `${name} internal error: ${visible(message.split('\n')[0].slice(0, 500))}; set TREFOIL_DEBUG=1 to print the stack`,
    );
  if (io.env['TREFOIL_DEBUG'] && error instanceof Error) io.err(error.stack ?? '');
  return isExpected ? error.exitCode : ExitCode.failed;
}

/** Commands of other programs. */
const OTHER_NAMES: Readonly<Record<string, string>> = {
  finetune: 'fine-tune with trefoil train --config lora --from MODEL --local-path FILE (docs/guide/fine-tune.md)',
};

/** Commander's "error: unknown option '--ful'\n(Did you mean --full?)" on one line. */
function usageLine(
  { code, message }: CommanderError,
  argv: readonly string[],
  commands: readonly CommandEntry[],
): string {
  const stopping = commands.flatMap(({ name, stops }) => (stops ? [name] : []));
  const line = message
    .replace(/^error: /, '')
    .replace(/\s*\n\s*/g, ' ')
    .replace(/ \(Did you mean (one of )?(.*)\?\)/, (_, _several, names: string) =>
      suggestion(names.split(', '), stopping),
    );
  const other = code === 'commander.unknownCommand' ? OTHER_NAMES[argv[0]?.replace('-', '')] : undefined;
  if (other !== undefined) return `unknown command '${argv[0]}'; ${other}`;
  return code === 'commander.missingMandatoryOptionValue' ? `${line}${missingHint(line, argv)}` : line;
}

function suggestion(names: readonly string[], stopping: readonly string[]): string {
  const harmless = names.filter((name) => !stopping.includes(name));
  return harmless.length === 0 ? '' : ` (did you mean ${harmless.join(' or ')}?)`;
}

/** Commander reports a missing option before an unknown one, which may be the same, misspelled. */
function missingHint(line: string, argv: readonly string[]): string {
  const missing = /--[\w-]+/.exec(line)?.[0] ?? '';
  const misspelled = argv.find((word) => word.startsWith('--') && nearest(word, [missing]) !== undefined);
  const end = argv.findIndex((word) => word.startsWith('-'));
  const command = argv.slice(0, end < 0 ? argv.length : end).join(' ');
  return `${misspelled ? ` (is ${misspelled} a misspelling?)` : ''}; see trefoil ${command} --help`;
}
