/** `trefoil status`: how far runs are. */
import { type Command, Option } from 'commander';
import { findRuns } from '../run/run-reader.js';
import { duration } from '../train/records.js';
import { type RunStatus, runStatus } from '../watch/status.js';
import { type Io, printJson } from './shared/io.js';
import { jsonOption } from './shared/options.js';
import { formatTable } from './shared/table.js';

export function configure(command: Command, io: Io): void {
  command
    .addOption(
      new Option('--dir <folder...>', 'folders of runs, or a folder that holds some').default(
        ['artifacts'],
        'artifacts',
      ),
    )
    .addOption(jsonOption())
    .action((options: { dir: string[]; json?: boolean }) => status(options, io));
}

function status(options: { dir: string[]; json?: boolean }, io: Io): void {
  const runs = options.dir.flatMap(findRuns).map((dir) => runStatus(dir));
  if (options.json) printJson(io, { runs });
  else if (runs.length === 0) io.out(`no runs in ${options.dir.join(', ')}`);
  else {
    io.out(table(runs));
    for (const line of runs.flatMap(rankLines)) io.out(line);
  }
}

/** One line for each of several ranks: which one the others wait for shows at a glance. */
function rankLines({ run, state, ranks }: RunStatus): string[] {
  if (state !== 'running') return [];
  return ranks.map(({ rank, step, section, section_age_s: age }) => {
    const where = section === null || age === null ? '' : `, in ${section} for ${duration(age)}`;
    return `${run} rank ${rank}: step ${step ?? '-'}${where}`;
  });
}

function table(runs: readonly RunStatus[]): string {
  const right = 'right' as const;
  return formatTable(
    [
      ...[{ title: 'run' }, { title: 'state' }, { title: 'step', align: right }, { title: 'loss', align: right }],
      ...[
        { title: 'val', align: right },
        { title: 'tok/s', align: right },
        { title: 'left', align: right },
      ],
      ...[
        { title: 'heartbeat', align: right },
        { title: 'checkpoint', align: right },
      ],
    ],
    runs.map((run) => [
      run.run,
      run.state,
      run.steps === null ? String(run.step ?? '-') : `${run.step ?? '-'}/${run.steps}`,
      run.loss?.toFixed(4) ?? '-',
      run.val_loss?.toFixed(4) ?? '-',
      run.tokens_per_s?.toFixed(0) ?? '-',
      run.seconds_left === null ? '-' : duration(run.seconds_left),
      run.heartbeat_age_s === null ? '-' : `${duration(run.heartbeat_age_s)} ago`,
      run.checkpoint === null ? '-' : `step ${run.checkpoint}`,
    ]),
  ).trimEnd();
}
