/** `trefoil halt`: stops a run after its step and a checkpoint. */
import { type Command, Option } from 'commander';
import { ExitCode } from '../errors.js';
import { haltRun } from '../watch/halt.js';
import { type Io, printJson } from './shared/io.js';
import { jsonOption } from './shared/options.js';
import { dirOption, numberFrom } from './shared/run-options.js';

interface Options {
  readonly dir: string;
  readonly reason: string;
  readonly timeout: number;
  readonly json?: boolean;
}

export function configure(command: Command, io: Io): void {
  command
    .addOption(dirOption())
    .addOption(new Option('--reason <text>', 'reason, written to .HALT').default('manual_stop'))
    .addOption(
      new Option('--timeout <seconds>', 'maximum wait for the end; 0 = do not wait')
        .argParser(numberFrom(0))
        .default(600),
    )
    .addOption(jsonOption('{status, detail, step, checkpoint, seconds}'))
    .addHelpText('after', '\nExit code: 0 the run has ended (or --timeout 0), 1 it is still active.\n')
    .action((options: Options) => halt(options, io));
}

async function halt(options: Options, io: Io): Promise<void> {
  const result = await haltRun(options.dir, options);
  if (options.json) printJson(io, result);
  else {
    const checkpoint = result.checkpoint === null ? 'no checkpoint' : `newest checkpoint: step ${result.checkpoint}`;
    io.out(`${result.status} at step ${result.step ?? '-'} (${result.detail}); ${checkpoint}`);
  }
  if (result.status === 'waiting' && options.timeout > 0) {
    io.err(
      'the run is still active: wait longer, or send SIGTERM to its process (the pid is in trefoil status --json)',
    );
    io.exitCode = ExitCode.failed;
  }
}
