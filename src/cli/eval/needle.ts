/** `trefoil eval needle`: measures retrieval from the context by depth and length. */
import { join } from 'node:path';
import { heatMap, percent } from '../../dashboard/report/heat-map.js';
import { UsageError } from '../../errors.js';
import { evaluateNeedle, type NeedleCell, type NeedleGrid } from '../../evaluate/needle.js';
import { withoutBranch } from '../../evaluate/without-branch.js';
import { ensureFolder, writeFileAtomic } from '../../files.js';
import { withEnvironment } from '../../infer/environment.js';
import { loadModel } from '../../infer/load.js';
import { kernelOptions } from '../../model/kernels.js';
import { BRANCHES, type Branch } from '../../ops/attention/gate/op.js';
import { runBlocking } from '../shared/blocking.js';
import { deviceOption, openDevice } from '../shared/device.js';
import { type Io, ProgressLine, printJson } from '../shared/io.js';
import {
  adapterOption,
  choice,
  configured,
  flag,
  jsonOption,
  modelOption,
  type OptionValues,
  parsed,
  percentages,
  threadsOption,
  weightsOption,
  wholeNumber,
  wholeNumbers,
} from '../shared/options.js';
import { formatTable } from '../shared/table.js';

/** A cell of the grid, with the branch that was disabled. */
interface NeedleRow extends NeedleCell {
  readonly without: Branch | null;
}

const DEPTHS = Array.from({ length: 11 }, (_, i) => 10 * i);

const OPTIONS = {
  model: modelOption(),
  adapter: adapterOption(),
  lengths: parsed('--lengths <list>', 'context lengths in tokens', wholeNumbers(1), [4096, 16_384, 65_536]),
  depths: parsed('--depths <list>', 'positions of the needle, in percent of the context', percentages, DEPTHS),
  trials: parsed('--trials <n>', 'cases per length and depth', wholeNumber(1), 20),
  records: parsed('--records <n>', 'records per case, including the needle', wholeNumber(1), 16),
  facts: parsed('--facts <n>', 'facts per record', wholeNumber(1), 4),
  seed: parsed('--seed <n>', 'seed of the cases', wholeNumber(0), 1),
  without: choice('--without <branch>', 'also measure with the gate of this branch set to zero', BRANCHES),
  outDir: flag('--out-dir <folder>', 'write needle.json and needle.svg'),
  device: deviceOption('where to compute'),
  precision: choice('--precision <type>', 'type of activations (default: bf16 on CUDA, else fp32)', ['fp32', 'bf16']),
  weights: weightsOption(),
  threads: threadsOption(),
  json: jsonOption(
    '{model, step, device, precision, trials, records, facts, seed, seconds, rows: [{without, length, depth, trials, correct, accuracy, recall: {any, layers}}]}',
  ),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
For models trained with data.source needle: the cases come from the same
generator with other seeds. The answer is one token and the question ends the
context, so the argmax of the next token is what greedy decoding would produce.
The last row is the share of cases in which some layer selected the block that
holds the answer.
`;

export const configure = configured(OPTIONS, run, HELP);

function run(options: Options, io: Io): void {
  const device = openDevice(options);
  const precision = options.precision ?? (device.kind === 'cuda' ? 'bf16' : 'fp32');
  if (precision === 'bf16' && device.kind === 'cpu')
    throw new UsageError('--precision bf16: the CPU computes in fp32; omit the flag or use --device cuda');
  const { model, config, path, step, warnings } = loadModel(
    device,
    options.model,
    precision === 'bf16' ? 'bf16' : 'f32',
    options,
  );
  const progress = new ProgressLine(io);
  try {
    for (const warning of warnings) io.warn(warning);
    const { lengths, depths, trials, records, facts, seed, without } = options;
    const grid = { lengths, depths, trials, records, facts, seed };
    const kernels = kernelOptions(withEnvironment(config, io.env));
    const started = performance.now();
    const rowsWith = (off: Branch | null): NeedleRow[] => {
      const onProgress = (done: number, all: number) => progress.show(`${labelOf(off)}: ${done} of ${all} cases`);
      const measure = () => evaluateNeedle(model, grid, { kernels, onProgress });
      return (off ? withoutBranch(model, off, measure) : measure()).map((cell) => ({ without: off, ...cell }));
    };
    const rows = runBlocking(() => [...rowsWith(null), ...(without ? rowsWith(without) : [])]);
    progress.clear();
    const seconds = (performance.now() - started) / 1000;
    const result = { model: path, step, device: device.name, precision, trials, records, facts, seed, seconds, rows };
    if (options.outDir !== undefined) writeFiles(options.outDir, options, result);
    if (options.json) printJson(io, result);
    else for (const off of without ? [null, without] : [null]) io.out(table(off, options, rows));
  } finally {
    model.free();
  }
}

function labelOf(without: Branch | null): string {
  return without === null ? 'all branches' : `without ${without}`;
}

/** Accuracies of one grid: [depth, length]. */
function accuracies(off: Branch | null, { lengths, depths }: NeedleGrid, rows: readonly NeedleRow[]): number[][] {
  return depths.map((depth) =>
    lengths.map(
      (length) => rows.find((row) => row.without === off && row.length === length && row.depth === depth)!.accuracy,
    ),
  );
}

const SHADES = ['·', '░', '▒', '▓', '█'];

/** The share as a number and as a shade, which is full only at 100 %. */
function shaded(share: number): string {
  return `${percent(share)} ${SHADES[Math.floor(share * (SHADES.length - 1))].repeat(2)}`;
}

function table(off: Branch | null, options: Options, rows: readonly NeedleRow[]): string {
  const titles = ['depth', ...options.lengths.map(String)];
  const selected = options.lengths.map((length) => selectedShare(off, length, rows));
  return `${labelOf(off)}\n${formatTable(
    titles.map((title) => ({ title, align: 'right' as const })),
    [
      ...accuracies(off, options, rows).map((line, i) => [`${options.depths[i]} %`, ...line.map(shaded)]),
      ...(selected.includes(null) ? [] : [['selected', ...selected.map((share) => shaded(share!))]]),
    ],
  )}`;
}

/** Share of the cases of a length in which the block with the answer was selected; null for dense attention. */
function selectedShare(off: Branch | null, length: number, rows: readonly NeedleRow[]): number | null {
  const shares = rows.filter((row) => row.without === off && row.length === length).map(({ recall }) => recall?.any);
  if (shares.includes(undefined)) return null;
  return shares.reduce<number>((sum, share) => sum + share!, 0) / shares.length;
}

function writeFiles(folder: string, options: Options, result: { readonly rows: readonly NeedleRow[] }): void {
  ensureFolder(folder);
  const svg = heatMap({
    title: 'Needles found, by depth and length',
    x: 'tokens',
    y: 'depth',
    columns: options.lengths.map(String),
    rows: options.depths.map((depth) => `${depth} %`),
    tables: [null, ...(options.without ? [options.without] : [])].map((off) => ({
      title: labelOf(off),
      values: accuracies(off, options, result.rows),
    })),
  });
  writeFileAtomic(join(folder, 'needle.json'), `${JSON.stringify(result)}\n`);
  writeFileAtomic(join(folder, 'needle.svg'), `${svg}\n`);
}
