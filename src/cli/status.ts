/** `trefoil status`: the progress of runs. */
import { findRuns } from '../run/reader.js';
import { visible } from '../text.js';
import { duration } from '../train/report.js';
import { stateText } from '../watch/state.js';
import { type RunStatus, runStatus } from '../watch/status.js';
import { type Io, printJson } from './shared/io.js';
import { configured, flag, jsonOption, type OptionValues } from './shared/options.js';
import { formatTable, right, wrapped } from './shared/table.js';

const OPTIONS = {
  dir: flag('--dir <folder...>', 'run folders, or folders that contain runs').default(['artifacts'], 'artifacts'),
  json: jsonOption(
    '{runs: [{run, dir, state, detail, status, reason, advice, synthetic, step, steps, loss, val_loss, tokens_per_s, seconds_left, heartbeat_age_s, checkpoint, section, ranks, halt, anomaly, problems}]}',
  ),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
State: not started, starting, running, suspended (SIGSTOP), done, stopped (by a
signal), halted (by .HALT, NaN or differing ranks), gave up (the data source),
failed (an error), died (the process is gone without an end), unknown (on
another host, no heartbeat). A line below the table gives the reason and what
to do. left: estimated time left; beat: age of the last heartbeat; saved: step
of the newest checkpoint. Times are h:mm:ss or m:ss.
`;

export const configure = configured(OPTIONS, status, HELP);

function status({ dir: folders = [], json }: Options, io: Io): void {
  const runs = folders.flatMap(findRuns).map((dir) => runStatus(dir));
  if (json) printJson(io, { runs });
  else if (runs.length === 0) io.out(`no runs in ${folders.join(', ')}`);
  else {
    io.out(table(runs, io.width));
    for (const line of runs.flatMap(rankLines)) io.out(line);
    for (const run of runs)
      if (run.advice !== '' || run.synthetic !== null) {
        const text = stateText({ name: run.status, reason: run.reason, synthetic: run.synthetic });
        io.out(visible([`${run.run} ${text}`, run.advice].filter((part) => part !== '').join('; ')));
      }
  }
}

/** One line per rank of a run with several, to show which rank the others wait for. */
function rankLines({ run, state, ranks }: RunStatus): string[] {
  if (state !== 'running') return [];
  return ranks.map(({ rank, step, section, section_age_s: age }) => {
    const where = section === null || age === null ? '' : `, in ${section} for ${duration(age)}`;
    return `${run} rank ${rank}: step ${step ?? '-'}${where}`;
  });
}

function table(runs: readonly RunStatus[], width: number): string {
  return formatTable(
    [wrapped('run'), 'state', ...right('step', 'loss', 'val', 'tok/s', 'left', 'beat', 'saved')],
    runs.map((run) => [
      visible(run.run),
      run.synthetic === null ? run.status : `${run.status}, SYNTHETIC data`,
      run.steps === null ? String(run.step ?? '-') : `${run.step ?? '-'}/${run.steps}`,
      run.loss?.toFixed(3) ?? '-',
      run.val_loss?.toFixed(3) ?? '-',
      run.tokens_per_s?.toFixed(0) ?? '-',
      run.seconds_left === null ? '-' : duration(run.seconds_left),
      run.heartbeat_age_s === null ? '-' : duration(run.heartbeat_age_s),
      run.checkpoint === null ? '-' : String(run.checkpoint),
    ]),
    width,
  ).trimEnd();
}
