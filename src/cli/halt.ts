/** `trefoil halt`: stops a run after its step and a checkpoint. */
import { ExitCode } from '../errors.js';
import { visible } from '../text.js';
import { haltRun } from '../watch/halt.js';
import { type Io, printJson } from './shared/io.js';
import { configured, jsonOption, numberFrom, type OptionValues, parsed } from './shared/options.js';
import { dirOption } from './shared/run-options.js';

const OPTIONS = {
  dir: dirOption(),
  reason: parsed('--reason <text>', 'reason, written to .HALT', String, 'manual_stop'),
  timeout: parsed('--timeout <seconds>', 'maximum wait for the end; 0 = do not wait', numberFrom(0), 600),
  json: jsonOption('{status, state, detail, step, checkpoint, seconds}'),
};
type Options = OptionValues<typeof OPTIONS>;

export const configure = configured(
  OPTIONS,
  halt,
  '\nExit code: 0 the run has ended (or --timeout 0), 1 it is still active.\n',
);

async function halt(options: Options, io: Io): Promise<void> {
  const result = await haltRun(options.dir, options);
  if (options.json) printJson(io, result);
  else {
    const checkpoint = result.checkpoint === null ? 'no checkpoint' : `newest checkpoint: step ${result.checkpoint}`;
    io.out(visible(`${result.state}; step ${result.step ?? '-'}; ${checkpoint}`));
  }
  if (result.status === 'waiting' && options.timeout > 0) {
    io.err(
      'the run is still active: wait longer, or send SIGTERM to its process (the pid is in trefoil status --json)',
    );
    io.exitCode = ExitCode.failed;
  }
}
