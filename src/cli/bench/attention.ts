/** `trefoil bench attention`: measures sparse and dense attention by sequence length. */

import { availableParallelism } from 'node:os';
import {
  type AttentionPart,
  type AttentionRow,
  type BenchPass,
  benchAttention,
  benchLinear,
} from '../../bench/attention.js';
import { measureDevicePeak } from '../../bench/peak/device.js';
import type { TimeBudget } from '../../bench/timing.js';
import { CudaDevice } from '../../device/cuda/cuda.js';
import type { Device } from '../../device/device.js';
import { isHostDevice } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import { fixed } from '../../numbers.js';
import { SELECTED_PATHS } from '../../ops/attention/fused/op.js';
import { validateShapes } from '../../ops/attention/shape.js';
import { plural } from '../../text.js';
import { runBlocking } from '../shared/blocking.js';
import { deviceOption, openDevice } from '../shared/device.js';
import { type Io, ProgressLine, printJson } from '../shared/io.js';
import {
  choice,
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
import { formatCsv, formatTable, right, wrapped } from '../shared/table.js';

const LENGTHS = [1024, 2048, 4096, 8192, 16_384, 32_768];
const QUICK_LENGTHS = [1024, 2048, 4096];
const CUDA_LENGTHS = [2048, 8192, 32_768, 65_536];
const CUDA_QUICK_LENGTHS = [8192, 65_536];
/** Tokens that fill a GPU, whatever the sequence length. */
const CUDA_TOKENS = 65_536;
const SPARSE = { l: 32, d: 16, lSel: 64, nSel: 16, w: 512 };
const LINEAR = { rows: 2048, inputs: 768, outputs: 3072 };
const CUDA_LINEAR = { ...LINEAR, rows: CUDA_TOKENS };

const OPTIONS = {
  device: deviceOption(),
  threads: threadsOption(),
  lengths: parsed(
    '--lengths <list>',
    `sequence lengths (default: ${LENGTHS.join(',')}; on CUDA ${CUDA_LENGTHS.join(',')})`,
    wholeNumbers(1),
  ),
  tokens: parsed(
    '--tokens <n>',
    `total tokens of all sequences (default: one sequence; on CUDA ${CUDA_TOKENS})`,
    wholeNumber(1),
  ),
  quick: flag(
    '--quick',
    `fewer runs, and lengths ${QUICK_LENGTHS.join(',')} (CUDA: ${CUDA_QUICK_LENGTHS.join(',')}) by default`,
  ),
  heads: parsed('--heads <n>', 'query heads', wholeNumber(1), 12),
  groups: parsed('--groups <n>', 'key/value groups', wholeNumber(1), 2),
  dim: parsed('--dim <n>', 'head size of keys and values', wholeNumber(1), 64),
  selection: choice(
    '--selection <kind>',
    'real = by scores of random keys (worst case), local = nearest blocks',
    ['real', 'local'],
    'real',
  ),
  path: choice(
    '--path <name>',
    'CUDA: kernel of the selected branch; adaptive = chosen by the selections',
    SELECTED_PATHS,
    'adaptive',
  ),
  deterministic: flag('--deterministic', 'CUDA: sum gradients in a fixed order'),
  portable: flag('--portable', 'CUDA: mma.sync instead of wgmma'),
  json: jsonOption(
    '{machine, device, threads, peak_gflops, rows: [{what, pass, kernel, S, sequences, ms, gflops, peak_share, extra_bytes}]}',
  ),
  csv: csvOption(),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
Blocks as in the paper: l 32, d 16, l_sel 64, n_sel 16, w 512. Times are
medians. The CPU computes one sequence in fp32. CUDA computes in bf16, with as
many sequences as fill ${CUDA_TOKENS} tokens, and is timed by CUDA events;
there the fused kernels are one operation, whose parts are also launched alone.
GFLOP/s counts the visible (query, key) pairs; the peak is measured. extra MiB
is memory beyond inputs and outputs.
`;

export const configure = configured(OPTIONS, (options, io) => runBlocking(() => bench(options, io)), HELP);

interface Result {
  readonly machine: string;
  readonly device: string;
  readonly threads: number;
  readonly peak_gflops: number;
  readonly rows: readonly (AttentionRow & { readonly peak_share: number })[];
}

function bench(options: Options, io: Io): void {
  const { heads, groups, dim, selection, path, deterministic = false, portable = false } = options;
  const shape = { heads, groups, dk: dim, dv: dim };
  validateShapes(shape, SPARSE);
  const device = openDevice(options);
  const plan = planOf(device, options);
  const kernels = { path, deterministic, mmaSync: portable };
  const progress = new ProgressLine(io);
  const onRow = ({ S, what, pass, ms, gflops }: AttentionRow) =>
    progress.show(`S ${S} ${what} ${pass}: ${ms.toFixed(plan.digits)} ms, ${gflops.toFixed(0)} GFLOP/s`);
  const before = measureDevicePeak(device);
  // Ascending lengths, the linear layer last: workspaces never shrink, so a large one would be charged to a small case.
  const attention = plan.lengths.flatMap((S) => {
    const sequences = Math.max(1, Math.floor(plan.tokens / S));
    const setting = { heads: shape, sparse: SPARSE, selection, budget: plan.budget, sequences, options: kernels };
    const rows = benchAttention(device, S, setting, onRow);
    device.pool.trim();
    return rows;
  });
  const linear = benchLinear(device, plan.linear, plan.budget, onRow);
  progress.clear();
  // Measured twice, because another process may have slowed the first one down.
  const peak = Math.max(before, measureDevicePeak(device)) / 1e9;
  const result: Result = {
    machine: `${device.name}, ${plan.size}`,
    device: device.kind,
    threads: plan.threads,
    peak_gflops: fixed(peak, 1),
    rows: [...linear, ...attention].map((row) => withShare(row, peak)),
  };
  if (options.json) printJson(io, result);
  else if (options.csv) io.out(formatCsv(COLUMNS, result.rows));
  else io.out(report(result, plan, io.width));
}

/** The measurements for one device. */
interface Plan {
  readonly lengths: readonly number[];
  readonly tokens: number;
  readonly budget: TimeBudget;
  readonly linear: typeof LINEAR;
  readonly size: string;
  readonly threads: number;
  /** Decimals of milliseconds. */
  readonly digits: number;
}

function planOf(device: Device, { lengths, tokens, quick = false }: Options): Plan {
  const sorted = (given: readonly number[]) => [...new Set(lengths ?? given)].sort((a, b) => a - b);
  const budget = quick ? { ms: 300, maxRuns: 5 } : { ms: 1500, maxRuns: 15 };
  if (device instanceof CudaDevice)
    return {
      lengths: sorted(quick ? CUDA_QUICK_LENGTHS : CUDA_LENGTHS),
      tokens: tokens ?? CUDA_TOKENS,
      budget,
      linear: CUDA_LINEAR,
      size: `${device.multiprocessors} multiprocessors`,
      threads: 1,
      digits: 3,
    };
  if (isHostDevice(device))
    return {
      lengths: sorted(quick ? QUICK_LENGTHS : LENGTHS),
      tokens: tokens ?? 1,
      budget,
      linear: LINEAR,
      size: `${availableParallelism()} cores`,
      threads: device.threads,
      digits: 1,
    };
  throw new UsageError(`bench attention does not support ${device.name}`);
}

const COLUMNS = ['what', 'pass', 'kernel', 'S', 'sequences', 'ms', 'gflops', 'peak_share', 'extra_bytes'] as const;

function withShare(row: AttentionRow, peak: number): Result['rows'][number] {
  const { what, pass, kernel, S, sequences, extra_bytes } = row;
  const [ms, gflops, peak_share] = [fixed(row.ms, 3), fixed(row.gflops, 1), fixed(row.gflops / peak, 4)];
  return { what, pass, kernel, S, sequences, ms, gflops, peak_share, extra_bytes };
}

function report(
  { machine, device, threads, peak_gflops, rows }: Result,
  { lengths, digits }: Plan,
  width: number,
): string {
  const hosts = device === 'cuda' ? '' : ` ${plural(threads, 'thread')},`;
  return [
    `${machine};${hosts} measured peak ${peak_gflops.toFixed(0)} GFLOP/s`,
    '',
    rowTable(rows, digits, width),
    lengthTable(rows, lengths, digits),
  ].join('\n');
}

const ORDER: readonly AttentionPart[] = ['linear', 'dense', 'nsa', 'cmp', 'score', 'sel', 'win'];

function rowTable(rows: Result['rows'], digits: number, width: number): string {
  const place = (row: Result['rows'][number]) => (row.what === 'linear' ? -1 : row.S);
  const sorted = [...rows].sort((a, b) => place(a) - place(b) || ORDER.indexOf(a.what) - ORDER.indexOf(b.what));
  return formatTable(
    [...right('S'), 'what', 'pass', wrapped('kernel'), ...right('ms', 'GFLOP/s', 'of peak', 'extra MiB')],
    sorted.map((row) => [
      ...[String(row.S), row.what, row.pass, row.kernel],
      ...[row.ms.toFixed(digits), row.gflops.toFixed(0), `${(100 * row.peak_share).toFixed(0)} %`],
      (row.extra_bytes / 2 ** 20).toFixed(1),
    ]),
    width,
  );
}

/** Ratio of dense to sparse time per length, and the growth from one length to the next. */
function lengthTable(rows: Result['rows'], lengths: readonly number[], digits: number): string {
  const ms = (what: AttentionPart, pass: BenchPass, S: number) =>
    rows.find((row) => row.what === what && row.pass === pass && row.S === S)?.ms ?? Number.NaN;
  const both = (what: AttentionPart, S: number) => ms(what, 'forward', S) + ms(what, 'backward', S);
  const times = (value: number) => `${value.toFixed(2)}x`;
  return formatTable(
    right('S', 'dense ms', 'NSA ms', 'dense/NSA', 'forward', 'backward', 'dense grows', 'NSA grows'),
    lengths.map((S, i) => {
      const [dense, nsa] = [both('dense', S), both('nsa', S)];
      const before = lengths[i - 1];
      return [
        ...[String(S), dense.toFixed(digits), nsa.toFixed(digits), times(dense / nsa)],
        times(ms('dense', 'forward', S) / ms('nsa', 'forward', S)),
        times(ms('dense', 'backward', S) / ms('nsa', 'backward', S)),
        ...(i === 0 ? ['', ''] : [times(dense / both('dense', before)), times(nsa / both('nsa', before))]),
      ];
    }),
  );
}
