/** Shared by `bench decode` and `bench prefill`: flags, and rows as a table, CSV or JSON. */
import { type Command, Option } from 'commander';
import type { DecodeBench } from '../../bench/decode-setup.js';
import { caseShape, trainCases } from '../../bench/train-cases.js';
import { CpuDevice } from '../../device/cpu/cpu.js';
import type { Device } from '../../device/device.js';
import { runBlocking } from '../shared/blocking.js';
import { type DeviceChoice, deviceOption, openDevice } from '../shared/device.js';
import { type Io, ProgressLine, printJson } from '../shared/io.js';
import { jsonOption, threadsOption, wholeNumber, wholeNumbers } from '../shared/options.js';
import { formatTable } from '../shared/table.js';

interface Options {
  readonly config: string;
  readonly lengths?: number[];
  readonly batchSize: number;
  readonly runs?: number;
  readonly dense: boolean;
  readonly device: DeviceChoice;
  readonly threads?: number;
  readonly quick?: boolean;
  readonly json?: boolean;
  readonly csv?: boolean;
}

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

export function configureCacheBench<Column extends string>(command: Command, io: Io, bench: CacheBench<Column>): void {
  command
    .addOption(new Option('--config <name|file>', 'shipped config or YAML file of the model').default('base'))
    .addOption(
      new Option(
        '--lengths <list>',
        `sequence lengths (default: ${bench.lengths.join(',')}; on CUDA ${bench.gpuLengths.join(',')})`,
      ).argParser(wholeNumbers(1)),
    )
    .addOption(new Option('--batch-size <n>', 'sequences per batch').argParser(wholeNumber(1)).default(1))
    .addOption(new Option('--runs <n>', `timed runs (default: ${bench.runs})`).argParser(wholeNumber(1)))
    .addOption(new Option('--no-dense', 'skip the model with dense attention'))
    .addOption(deviceOption('where to compute'))
    .addOption(threadsOption())
    .addOption(new Option('--quick', `${QUICK_RUNS} runs, and lengths ${bench.quickLengths.join(',')} by default`))
    .addOption(jsonOption(`{rows: [{${bench.columns.join(', ')}}]}`))
    .addOption(new Option('--csv', 'print the rows as CSV on stdout').conflicts('json'))
    .addHelpText('after', bench.help)
    .action((options: Options) => runBlocking(() => run(options, io, bench)));
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
  else if (options.csv)
    io.out(
      [bench.columns.join(','), ...rows.map((row) => bench.columns.map((name) => row[name] ?? '').join(','))].join(
        '\n',
      ),
    );
  else {
    const count =
      device instanceof CpuDevice ? `, ${device.threads} ${device.threads === 1 ? 'thread' : 'threads'}` : '';
    io.out(`${device.name}${count}; model: ${config}\n`);
    io.out(
      formatTable(
        bench.titles.map((title) => ({ title, align: 'right' as const })),
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
