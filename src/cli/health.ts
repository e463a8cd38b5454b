/** `trefoil health`: checks a run once, with an exit code for cron. */
import { ExitCode } from '../errors.js';
import { visible } from '../text.js';
import { checkHealth } from '../watch/rules.js';
import { stateText } from '../watch/state.js';
import { resolveThresholds } from '../watch/thresholds.js';
import { type Io, printJson } from './shared/io.js';
import { choice, configured, jsonOption, type OptionValues } from './shared/options.js';
import { printRows } from './shared/rows.js';
import { dirOption, givenThresholds, thresholdOptions } from './shared/run-options.js';

const OPTIONS = {
  dir: dirOption(),
  allow: choice('--allow <state>', 'stopped: a run that a signal or .HALT stopped is healthy too', ['stopped']),
  ...thresholdOptions(),
  json: jsonOption('{ok, state, reason, advice, synthetic, rows: [{rule, level, value, limit}]}'),
};
type Options = OptionValues<typeof OPTIONS>;

export const configure = configured(
  OPTIONS,
  health,
  `
The first line says how the run is, and what to do. Exit code: 0 it is running
or done and no rule failed, 1 otherwise, 2 no such run.
`,
);

function health(options: Options, io: Io): void {
  const verdict = checkHealth(options.dir, resolveThresholds(io.env, givenThresholds(options)), {
    allowStopped: options.allow === 'stopped',
  });
  if (options.json) printJson(io, verdict);
  else {
    io.out(
      visible(
        [stateText({ name: verdict.state, ...verdict }), verdict.advice].filter((part) => part !== '').join('; '),
      ),
    );
    printRows(io, verdict.rows, `${new Date().toISOString()} ${verdict.ok ? 'healthy' : 'NOT healthy'}`);
  }
  if (!verdict.ok) io.exitCode = ExitCode.failed;
}
