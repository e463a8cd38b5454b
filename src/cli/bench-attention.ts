/** `trefoil bench attention`: sparse and dense attention by length on this machine. */
import { availableParallelism } from 'node:os';
import { type Command, Option } from 'commander';
import { type AttentionRow, benchLength, benchLinear, type Pass, type What } from '../bench/attention.js';
import { measurePeak } from '../bench/peak/op.js';
import { CpuDevice } from '../device/cpu/cpu.js';
import { UsageError } from '../errors.js';
import { validateShapes } from '../ops/attention.js';
import { type DeviceChoice, deviceOption, openDevice } from './device.js';
import { type Io, printJson } from './io.js';
import { jsonOption, threadsOption, wholeNumber, wholeNumbers } from './options.js';
import { formatTable } from './table.js';

interface Options {
  readonly device: DeviceChoice;
  readonly threads?: number;
  readonly lengths?: number[];
  readonly quick?: boolean;
  readonly heads: number;
  readonly groups: number;
  readonly dim: number;
  readonly selection: 'real' | 'local';
  readonly json?: boolean;
  readonly csv?: boolean;
}

const LENGTHS = [1024, 2048, 4096, 8192, 16_384, 32_768];
const QUICK_LENGTHS = [1024, 2048, 4096];
const SPARSE = { l: 32, d: 16, lSel: 64, nSel: 16, w: 512 };
const LINEAR = { rows: 2048, inputs: 768, outputs: 3072 };

export function configure(command: Command, io: Io): void {
  command
    .addOption(deviceOption('where to compute; auto = the fastest there is'))
    .addOption(threadsOption())
    .addOption(new Option('--lengths <list>', `lengths (default: ${LENGTHS.join(',')})`).argParser(wholeNumbers(1)))
    .addOption(new Option('--quick', `fewer runs, and lengths ${QUICK_LENGTHS.join(',')} if none are given`))
    .addOption(new Option('--heads <n>', 'query heads').argParser(wholeNumber(1)).default(12))
    .addOption(new Option('--groups <n>', 'key/value groups').argParser(wholeNumber(1)).default(2))
    .addOption(new Option('--dim <n>', 'size of a head, of keys and of values').argParser(wholeNumber(1)).default(64))
    .addOption(
      new Option('--selection <kind>', 'real = by the scores of random keys (worst case), local = nearest blocks')
        .choices(['real', 'local'])
        .default('real'),
    )
    .addOption(jsonOption())
    .addOption(new Option('--csv', 'print the rows as CSV on stdout').conflicts('json'))
    .addHelpText('after', HELP)
    .action((options: Options) => bench(options, io));
}

const HELP = `
Blocks as in the paper: l 32, d 16, l_sel 64, n_sel 16, w 512. One sequence. Times are medians.
GFLOP/s count the (query, key) pairs that are really visible; the peak is measured, not read from a data sheet.
extra is memory beyond inputs and outputs. Memory that kernels keep for themselves counts as held so far.
`;

interface Result {
  readonly machine: string;
  readonly device: string;
  readonly threads: number;
  readonly peak_gflops: number;
  readonly rows: readonly (AttentionRow & { readonly peak_share: number })[];
}

function bench(options: Options, io: Io): void {
  const { heads, groups, dim, selection, quick = false } = options;
  const shape = { heads, groups, dk: dim, dv: dim };
  validateShapes(shape, SPARSE);
  const lengths = [...new Set(options.lengths ?? (quick ? QUICK_LENGTHS : LENGTHS))].sort((a, b) => a - b);
  const device = openDevice(options);
  if (!(device instanceof CpuDevice)) throw new UsageError('bench attention measures the CPU; use --device cpu');
  const budget = quick ? { ms: 300, mostRuns: 5 } : { ms: 1500, mostRuns: 15 };
  const say = (row: AttentionRow) =>
    io.err(`S ${row.S}  ${row.what} ${row.pass}: ${row.ms.toFixed(1)} ms, ${row.gflops.toFixed(0)} GFLOP/s`);
  const before = measurePeak(device);
  // Rising lengths, the linear layer last: kernels' own memory never shrinks, so it must not be there before its turn.
  const attention = lengths.flatMap((S) => {
    const rows = benchLength(device, S, { heads: shape, sparse: SPARSE, selection, budget }, say);
    device.pool.trim();
    return rows;
  });
  const linear = benchLinear(device, LINEAR, budget, say);
  // Again, because a neighbour on the machine may have slowed the first one down.
  const peak = Math.max(before, measurePeak(device)) / 1e9;
  const result: Result = {
    machine: `${device.name}, ${availableParallelism()} cores`,
    device: device.kind,
    threads: device.threads,
    peak_gflops: round(peak, 1),
    rows: [...linear, ...attention].map((row) => withShare(row, peak)),
  };
  if (options.json) printJson(io, result);
  else if (options.csv) io.out(csv(result.rows));
  else io.out(report(result, lengths));
}

const COLUMNS = ['what', 'pass', 'kernel', 'S', 'sequences', 'ms', 'gflops', 'peak_share', 'extra_bytes'] as const;

function withShare(row: AttentionRow, peak: number): Result['rows'][number] {
  const { what, pass, kernel, S, sequences, extra_bytes } = row;
  const [ms, gflops, peak_share] = [round(row.ms, 3), round(row.gflops, 1), round(row.gflops / peak, 4)];
  return { what, pass, kernel, S, sequences, ms, gflops, peak_share, extra_bytes };
}

function csv(rows: Result['rows']): string {
  return [COLUMNS.join(','), ...rows.map((row) => COLUMNS.map((name) => row[name]).join(','))].join('\n');
}

function report(result: Result, lengths: readonly number[]): string {
  const { machine, threads, peak_gflops, rows } = result;
  return [
    `${machine}; ${threads} ${threads === 1 ? 'thread' : 'threads'}, measured peak ${peak_gflops.toFixed(0)} GFLOP/s`,
    '',
    rowTable(rows),
    lengthTable(rows, lengths),
  ].join('\n');
}

const ORDER: readonly What[] = ['linear', 'dense', 'nsa', 'cmp', 'score', 'sel', 'win'];

function rowTable(rows: Result['rows']): string {
  const place = (row: Result['rows'][number]) => (row.what === 'linear' ? -1 : row.S);
  const sorted = [...rows].sort((a, b) => place(a) - place(b) || ORDER.indexOf(a.what) - ORDER.indexOf(b.what));
  const numbers = ['ms', 'GFLOP/s', 'of peak', 'extra MiB'].map((title) => ({ title, align: 'right' as const }));
  return formatTable(
    [{ title: 'S', align: 'right' }, { title: 'what' }, { title: 'pass' }, { title: 'kernel' }, ...numbers],
    sorted.map((row) => [
      ...[String(row.S), row.what, row.pass, row.kernel],
      ...[row.ms.toFixed(1), row.gflops.toFixed(0), `${(100 * row.peak_share).toFixed(0)} %`],
      (row.extra_bytes / 2 ** 20).toFixed(1),
    ]),
  );
}

/** Dense over sparse at each length, and how both grow from one length to the next. */
function lengthTable(rows: Result['rows'], lengths: readonly number[]): string {
  const ms = (what: What, pass: Pass, S: number) =>
    rows.find((row) => row.what === what && row.pass === pass && row.S === S)?.ms ?? Number.NaN;
  const both = (what: What, S: number) => ms(what, 'forward', S) + ms(what, 'backward', S);
  const times = (value: number) => `${value.toFixed(2)}x`;
  const titles = ['S', 'dense ms', 'NSA ms', 'dense/NSA', 'forward', 'backward', 'dense grows', 'NSA grows'];
  return formatTable(
    titles.map((title) => ({ title, align: 'right' as const })),
    lengths.map((S, i) => {
      const [dense, nsa] = [both('dense', S), both('nsa', S)];
      const before = lengths[i - 1];
      return [
        ...[String(S), dense.toFixed(1), nsa.toFixed(1), times(dense / nsa)],
        times(ms('dense', 'forward', S) / ms('nsa', 'forward', S)),
        times(ms('dense', 'backward', S) / ms('nsa', 'backward', S)),
        ...(i === 0 ? ['', ''] : [times(dense / both('dense', before)), times(nsa / both('nsa', before))]),
      ];
    }),
  );
}

function round(value: number, digits: number): number {
  return Number(value.toFixed(digits));
}
