/** Shared by `bench decode` and `bench prefill`: flags, and rows as a table, CSV or JSON. */
import type { DecodeBench } from '../../bench/decode-setup.js';
import { caseShape, trainCases } from '../../bench/train-cases.js';
import { CpuDevice } from '../../device/cpu/cpu.js';
import type { Device } from '../../device/device.js';
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
    onRow: (row: Readonly<Record<Column, number>>) => void,
  ): Readonly<Record<Column, number>>[];
}

const QUICK_RUNS = 3;

const optionsOf = <Column extends string>(bench: CacheBench<Column>) => ({
  config: parsed('--config <name|file>', 'shipped config or YAML file of the model', String, 'base'),
  lengths: parsed(
    '--lengths <list>',
    `sequence lengths (default: ${bench.lengths.join(',')}; on CUDA ${bench.gpuLengths.join(',')})`,
    wholeNumbers(1),
  ),
  batchSize: parsed('--batch-size <n>', 'sequences per batch', wholeNumber(1), 1),
  runs: parsed('--runs <n>', `timed runs (default: ${bench.runs})`, wholeNumber(1)),
  dense: flag('--no-dense', 'skip the model with dense attention'),
  device: deviceOption('where to compute'),
  threads: threadsOption(),
  quick: flag('--quick', `${QUICK_RUNS} runs, and lengths ${bench.quickLengths.join(',')} by default`),
  json: jsonOption(`{rows: [{${bench.columns.join(', ')}}]}`),
  csv: csvOption(),
});
type Options = OptionValues<ReturnType<typeof optionsOf>>;

/** The `configure` of such a command. */
export function cacheBench<Column extends string>(bench: CacheBench<Column>) {
  return configured(optionsOf(bench), (options, io) => runBlocking(() => run(options, io, bench)), bench.help);
}

function run<Column extends string>(options: Options, io: Io, bench: CacheBench<Column>): void {
  const { config, quick = false, batchSize, dense } = options;
  const [named] = trainCases({ config, attention: 'nsa' }, io.env);
  const shape = caseShape(named);
  const device = openDevice(options);
  const usual = device.kind === 'cuda' ? bench.gpuLengths : bench.lengths;
  const lengths = [...new Set(options.lengths ?? (quick ? bench.quickLengths : usual))].sort((a, b) => a - b);
  const runs = options.runs ?? (quick ? QUICK_RUNS : bench.runs);
  const progress = new ProgressLine(io);
  const show = (done: number) =>
    progress.show(
      `${done} of ${lengths.length} lengths measured${done < lengths.length ? `; now S ${lengths[done]}` : ''}`,
    );
  let done = 0;
  show(done);
  const measured = bench.measure(device, lengths, { shape, batch: batchSize, runs, dense }, () => show(++done));
  progress.clear();
  const rows = measured.map((row) => Object.fromEntries(bench.columns.map((name) => [name, rounded(row[name])])));
  if (options.json) printJson(io, { rows });
  else if (options.csv) io.out(formatCsv<string>(bench.columns, rows));
  else {
    const count = device instanceof CpuDevice ? `, ${plural(device.threads, 'thread')}` : '';
    io.out(`${device.name}${count}; model: ${config}\n`);
    io.out(
      formatTable(
        right(...bench.titles),
        rows.map((row) => bench.columns.map((name) => cell(row[name]))),
        io.width,
      ),
    );
  }
}

/** Four significant digits; empty if not measured. */
function cell(value: number | null): string {
  return value === null ? '' : String(value >= 1000 ? Math.round(value) : Number(value.toPrecision(4)));
}

/** Null if not measured: JSON has no NaN. */
function rounded(value: number): number | null {
  return Number.isNaN(value) ? null : Number(value.toFixed(3));
}
