/** `trefoil check`: smoke checks on the files of a run, or of a run trained for the purpose. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, dirname, join } from 'node:path';
import { parseConfig } from '../config/parse.js';
import { ExitCode, TrefoilError, UsageError } from '../errors.js';
import { runPaths } from '../run/paths.js';
import { visible } from '../text.js';
import {
  type CheckInput,
  checkRun,
  compareBaseline,
  loadBaseline,
  runText,
  saveBaseline,
  stateRows,
} from '../watch/check.js';
import { verdict } from '../watch/row.js';
import { resolveThresholds } from '../watch/thresholds.js';
import { type Io, printJson } from './shared/io.js';
import { configured, flag, jsonOption, numberFrom, type OptionValues, parsed, wholeNumber } from './shared/options.js';
import { printRows } from './shared/rows.js';
import { runTraining } from './train.js';

const DEFAULT_MIN_STEPS = 10;
const SYNTHETIC_STEPS = 60;

const OPTIONS = {
  dir: flag('--dir <folder>', 'run folder'),
  csv: flag('--csv <file>', 'training.csv to use instead of the one in --dir'),
  heartbeat: flag('--heartbeat <file>', 'heartbeat file to use instead of the one in --dir'),
  minSteps: parsed('--min-steps <n>', `required number of steps (default: ${DEFAULT_MIN_STEPS})`, wholeNumber(1)),
  minTps: parsed('--min-tps <n>', 'required median of tokens per second', numberFrom(0), 0),
  saveBaseline: flag('--save-baseline <file>', 'write the figures of this run to a file, if it passes'),
  compareBaseline: flag('--compare-baseline <file>', 'compare with the figures of another run'),
  baselineTolerance: parsed(
    '--baseline-tolerance <share>',
    'how much worse than the baseline it may be',
    numberFrom(0),
    0.2,
  ),
  runSynthetic: flag('--run-synthetic', 'train a small model on random tokens and check that run'),
  json: jsonOption('{ok, rows: [{rule, level, value, limit}]}'),
};
type Options = OptionValues<typeof OPTIONS>;

export const configure = configured(OPTIONS, check, '\nExit code: 0 no rule failed, 1 at least one did.\n');

async function check(options: Options, io: Io): Promise<void> {
  // Read before any training, so that a missing file is reported at once.
  const baseline = options.compareBaseline === undefined ? undefined : loadBaseline(options.compareBaseline);
  const folder = options.runSynthetic ? mkdtempSync(join(tmpdir(), 'trefoil-check-')) : undefined;
  try {
    if (folder) await trainSynthetic(join(folder, 'run'), io);
    const input = folder ? filesOf(join(folder, 'run')) : inputOf(options);
    const { rows: found, measured } = checkRun(input, {
      minSteps: options.minSteps ?? (folder ? SYNTHETIC_STEPS : DEFAULT_MIN_STEPS),
      minTps: options.minTps,
      thresholds: resolveThresholds(io.env),
      mustLearn: folder === undefined,
    });
    const compared = baseline ? compareBaseline(measured, baseline, options.baselineTolerance) : [];
    const run = folderOf(input);
    const result = verdict([...found, ...(run ? stateRows(run) : []), ...compared]);
    if (options.json) printJson(io, result);
    else {
      if (run) io.out(visible(runText(run)));
      printRows(io, result.rows, result.ok ? 'passed' : 'FAILED');
    }
    if (options.saveBaseline !== undefined && result.ok) {
      saveBaseline(options.saveBaseline, measured);
      io.err(`wrote ${options.saveBaseline}`);
    } else if (options.saveBaseline !== undefined) io.err('no baseline written because the run did not pass');
    if (!result.ok) io.exitCode = ExitCode.failed;
  } finally {
    if (folder) rmSync(folder, { recursive: true, force: true });
  }
}

function inputOf({ dir, csv, heartbeat }: Options): CheckInput {
  if (dir !== undefined) {
    const files = filesOf(dir);
    return { csv: csv ?? files.csv, heartbeat: heartbeat ?? files.heartbeat };
  }
  if (csv !== undefined && heartbeat !== undefined) return { csv, heartbeat };
  throw new UsageError('check: give a run with --dir, files with --csv and --heartbeat, or --run-synthetic');
}

function filesOf(dir: string): CheckInput {
  const paths = runPaths(dir);
  return { csv: paths.training, heartbeat: paths.heartbeat(0) };
}

/** The run whose heartbeats are checked; undefined for a file that was copied elsewhere. */
function folderOf({ heartbeat }: CheckInput): string | undefined {
  const folder = dirname(heartbeat);
  return runPaths(folder).heartbeat(0) === join(folder, basename(heartbeat)) ? folder : undefined;
}

/** Trains a run of a few seconds that uses every part of the trainer. */
async function trainSynthetic(outDir: string, io: Io): Promise<void> {
  const config = parseConfig({
    model: { dim: 64, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 16, d_v: 16, mlp_ratio: 2 },
    nsa: { l: 16, d: 8, l_sel: 32, n_sel: 4, w: 32 },
    data: { source: 'synthetic', tokenizer: 'byte', val_fraction: 0 },
    runtime: { device: 'auto' },
    train: {
      steps: SYNTHETIC_STEPS,
      seq_len: 256,
      batch_size: 2,
      lr: 1e-3,
      warmup_steps: 5,
      log_every: 1,
      save_every: SYNTHETIC_STEPS,
      out_dir: outDir,
    },
  });
  const result = await runTraining(config, { resume: null, save: null, say: io.err }, io);
  if (result.status !== 'done') throw new TrefoilError(`the synthetic run ended early: ${result.status}`);
}
