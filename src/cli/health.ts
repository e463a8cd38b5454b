/** `trefoil health`: checks a run once, with an exit code for cron. */
import { ExitCode } from '../errors.js';
import { checkHealth } from '../watch/rules.js';
import { resolveThresholds } from '../watch/thresholds.js';
import { type Io, printJson } from './shared/io.js';
import { configured, jsonOption, type OptionValues } from './shared/options.js';
import { printRows } from './shared/rows.js';
import { dirOption, givenThresholds, thresholdOptions } from './shared/run-options.js';

const OPTIONS = {
  dir: dirOption(),
  ...thresholdOptions(),
  json: jsonOption('{ok, rows: [{rule, level, value, limit}]}'),
};
type Options = OptionValues<typeof OPTIONS>;

export const configure = configured(
  OPTIONS,
  health,
  '\nExit code: 0 no rule failed, 1 at least one did, 2 no such run.\n',
);

function health(options: Options, io: Io): void {
  const verdict = checkHealth(options.dir, resolveThresholds(io.env, givenThresholds(options)));
  if (options.json) printJson(io, verdict);
  else printRows(io, verdict.rows, `${new Date().toISOString()} ${verdict.ok ? 'healthy' : 'NOT healthy'}`);
  if (!verdict.ok) io.exitCode = ExitCode.failed;
}
