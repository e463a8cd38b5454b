/** Shared by `bench decode` and `bench prefill`: flags, and rows as a table, CSV or JSON. */
import type { DecodeBench } from '../../bench/decode-setup.js';
import { measureRead } from '../../bench/peak/op.js';
import { caseShape, trainCases } from '../../bench/train-cases.js';
import { unreadVariables } from '../../config/legacy/environment.js';
import type { Device } from '../../device/device.js';
import { type HostDevice, isHostDevice } from '../../device/device.js';
import { PROMPT_KEYS } from '../../infer/environment.js';
import { parameterCount } from '../../model/memory.js';
import type { ModelShape } from '../../model/shape.js';
import { SELECTION_KERNELS } from '../../ops/attention/selected/op.js';
import { plural } from '../../text.js';
import { runBlocking } from '../shared/blocking.js';
import { deviceOption, openDevice } from '../shared/device.js';
import { type Io, ProgressLine, printJson } from '../shared/io.js';
import {
  configured,
  csvOption,
  flag,
  jsonOption,
  type OptionValues,
  parsed,
  threadsOption,
  wholeNumber,
  wholeNumbers,
} from '../shared/options.js';
import { formatCsv, formatTable, right } from '../shared/table.js';
import { selectionKernels } from './selection-kernels.js';

export interface CacheBench<Column extends string> {
  readonly lengths: readonly number[];
  /** Default lengths on CUDA. */
  readonly gpuLengths: readonly number[];
  readonly quickLengths: readonly number[];
  readonly runs: number;
  readonly columns: readonly Column[];
  /** Headings of the columns in the table. */
  readonly titles: readonly string[];
  readonly help: string;
  measure(
    device: Device,
    lengths: readonly number[],
    bench: DecodeBench,
    onRow: (row: Readonly<Record<Column, number | string>>) => void,
  ): Readonly<Record<Column, number | string>>[];
  /** Whether the kernel of the selected branch can be chosen. */
  readonly choosesKernel?: boolean;
}

const QUICK_RUNS = 3;

const optionsOf = <Column extends string>(bench: CacheBench<Column>) => ({
  config: parsed('--config <name|file>', 'shipped config or YAML file of the model', String, 'base'),
  lengths: parsed(
    '--lengths <list>',
    `sequence lengths (default: ${bench.lengths.join(',')}; on CUDA ${bench.gpuLengths.join(',')})`,
    wholeNumbers(1),
  ),
  seqLen: parsed('--seq-len <list>', 'same as --lengths', wholeNumbers(1)).conflicts('lengths'),
  kernel: parsed(
    '--kernel <list>',
    `kernels of the selected branch to compare: ${SELECTION_KERNELS.join(', ')}`,
    selectionKernels,
  ),
  batchSize: parsed('--batch-size <n>', 'sequences per batch', wholeNumber(1), 1),
  runs: parsed('--runs <n>', `timed runs (default: ${bench.runs})`, wholeNumber(1)),
  dense: flag('--no-dense', 'skip the model with dense attention'),
  device: deviceOption('where to compute'),
  threads: threadsOption(),
  quick: flag('--quick', `${QUICK_RUNS} runs, and lengths ${bench.quickLengths.join(',')} by default`),
  json: jsonOption(`{rows: [{${bench.columns.join(', ')}}], weights: {bytes, gb_per_s, read_gb_per_s} on the CPU}`),
  csv: csvOption(),
});
type Options = OptionValues<ReturnType<typeof optionsOf>>;

/** The `configure` of such a command. */
export function cacheBench<Column extends string>(bench: CacheBench<Column>) {
  const { kernel, ...others } = optionsOf(bench);
  const flags = bench.choosesKernel ? { ...others, kernel } : others;
  return configured(
    flags as ReturnType<typeof optionsOf>,
    (options, io) => runBlocking(() => run(options, io, bench)),
    bench.help,
  );
}

function run<Column extends string>(options: Options, io: Io, bench: CacheBench<Column>): void {
  const { config, quick = false, batchSize, dense, kernel: kernels } = options;
  const ignored = (key: string) => !(key.startsWith('model.') || key === 'data.tokenizer' || PROMPT_KEYS.has(key));
  for (const line of unreadVariables(io.env, 'this bench', ignored)) io.warn(line);
  const [named] = trainCases({ config, attention: 'nsa' }, io.env);
  const shape = caseShape(named);
  const device = openDevice(options);
  const usual = device.kind === 'cuda' ? bench.gpuLengths : bench.lengths;
  const lengths = [...new Set(options.lengths ?? options.seqLen ?? (quick ? bench.quickLengths : usual))].sort(
    (a, b) => a - b,
  );
  const runs = options.runs ?? (quick ? QUICK_RUNS : bench.runs);
  const progress = new ProgressLine(io);
  const count = lengths.length * (kernels?.length ?? 1);
  const show = (done: number) =>
    progress.show(`${done} of ${count} measured${done < count ? `; now S ${lengths[done % lengths.length]}` : ''}`);
  let done = 0;
  show(done);
  const measured = bench.measure(
    device,
    lengths,
    { config: named.config, kernels, shape, batch: batchSize, runs, dense },
    () => show(++done),
  );
  progress.clear();
  const rows = measured.map((row) => Object.fromEntries(bench.columns.map((name) => [name, rounded(row[name])])));
  const weights = isHostDevice(device) ? weightRates(device, shape, measured[0]) : null;
  if (options.json) printJson(io, weights ? { rows, weights } : { rows });
  else if (options.csv) io.out(formatCsv<string>(bench.columns, rows));
  else {
    const threads = isHostDevice(device) ? `, ${plural(device.threads, 'thread')}` : '';
    io.out(`${device.name}${threads}; model: ${config}\n`);
    io.out(
      formatTable(
        right(...bench.titles),
        rows.map((row) => bench.columns.map((name) => cell(row[name]))),
        io.width,
      ),
    );
    if (weights) {
      const [gigabytes, rate, most] = [weights.bytes / 1e9, weights.gb_per_s, weights.read_gb_per_s].map(cell);
      io.out(`\nweights: ${gigabytes} GB, ${rate} GB/s in the first row; memory: ${most} GB/s`);
    }
  }
}

/** How fast the first row reads all weights once, beside how fast this machine reads memory. */
function weightRates(device: HostDevice, shape: ModelShape, row: Readonly<Record<string, number | string>>) {
  const table = shape.tieEmbeddings ? 0 : shape.vocabSize * shape.dim; // a token reads one row of it
  const bytes = 4 * (parameterCount(shape) - table);
  const perSecond = bytes / (Number(row['ms_total']) / 1000);
  return {
    bytes,
    gb_per_s: Number((perSecond / 1e9).toFixed(3)),
    read_gb_per_s: Number((measureRead(device) / 1e9).toFixed(3)),
  };
}

/** Four significant digits; empty if not measured. */
function cell(value: number | string | null): string {
  if (typeof value === 'string') return value;
  return value === null ? '' : String(value >= 1000 ? Math.round(value) : Number(value.toPrecision(4)));
}

/** Null if not measured: JSON has no NaN. */
function rounded(value: number | string): number | string | null {
  if (typeof value === 'string') return value;
  return Number.isNaN(value) ? null : Number(value.toFixed(3));
}
