/** `trefoil health`: checks a run once, with an exit code for cron. */
import type { Command } from 'commander';
import { ExitCode } from '../errors.js';
import { checkHealth } from '../watch/health.js';
import { resolveThresholds } from '../watch/thresholds.js';
import { type Io, printJson } from './shared/io.js';
import { jsonOption } from './shared/options.js';
import { printRows } from './shared/rows.js';
import { addThresholdOptions, dirOption, givenThresholds } from './shared/run-options.js';

export function configure(command: Command, io: Io): void {
  command.addOption(dirOption());
  addThresholdOptions(command)
    .addOption(jsonOption('{ok, rows: [{rule, level, value, limit}]}'))
    .addHelpText('after', '\nExit code: 0 no rule failed, 1 at least one did, 2 no such run.\n')
    .action((options: { dir: string; json?: boolean }) => health(options, io));
}

function health(options: { dir: string; json?: boolean }, io: Io): void {
  const verdict = checkHealth(options.dir, resolveThresholds(io.env, givenThresholds({ ...options })));
  if (options.json) printJson(io, verdict);
  else printRows(io, verdict.rows, `${new Date().toISOString()} ${verdict.ok ? 'healthy' : 'NOT healthy'}`);
  if (!verdict.ok) io.exitCode = ExitCode.failed;
}
