/** Everything about a run except its curves. */
import { runPaths } from '../run/paths.js';
import { explainRule } from '../watch/explain.js';
import type { Overview } from './answers.js';
import { listTraces, readConfig, readJson, tokensPerStep } from './run-files.js';
import type { FoundRun, Runs } from './runs.js';

const OF_A_BROKEN_RUN = {
  config: {},
  environment: null,
  metrics: null,
  health: [],
  marks: [],
  damaged: 0,
  traces: [],
  tokensPerStep: null,
};

/** Waits at most `patience` milliseconds for the log of events; without it, until all of it is read. */
export async function readOverview(runs: Runs, run: FoundRun, patience?: number): Promise<Overview> {
  const row = runs.row(run);
  if (row.state === 'broken') return { row, ...OF_A_BROKEN_RUN };
  const config = readConfig(run.dir);
  const paths = runPaths(run.dir);
  const log = runs.log(run, 'heartbeat');
  await log.catchUp(patience);
  return {
    row: config.problem ? { ...row, problems: [...row.problems, config.problem] } : row,
    config: Object.fromEntries(config.values),
    environment: readJson(paths.env),
    metrics: readJson(paths.metrics),
    health: runs.alerts(run).map((one) => ({ ...one, explanation: explainRule(one.rule) })),
    marks: log.marks,
    damaged: log.damaged,
    traces: listTraces(run.dir),
    tokensPerStep: tokensPerStep(config, row.ranks.length),
  };
}
