/** `trefoil bench train`: measures whole training steps, and optionally each kernel in them. */

import { availableParallelism } from 'node:os';
import { measureDevicePeak } from '../../bench/peak/device.js';
import { benchTraining, profileCudaStep, type StepBudget, type StepTime } from '../../bench/train.js';
import { caseLengths, caseShape, SMALL_GPT, type TrainCase, trainCases } from '../../bench/train-cases.js';
import { kernelFlops } from '../../bench/train-flops.js';
import { type ProfileRow, TimedDevice } from '../../bench/train-profile.js';
import { CudaDevice } from '../../device/cuda/cuda.js';
import type { Device } from '../../device/device.js';
import { isHostDevice } from '../../device/device.js';
import { fixed } from '../../numbers.js';
import { SELECTION_KERNELS } from '../../ops/attention/selected/op.js';
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
import { selectionKernels } from './selection-kernels.js';

const QUICK_LENGTH = 512;
const MIB = 2 ** 20;

const OPTIONS = {
  config: flag('--config <name|file>', `a shipped config, a YAML file, or ${SMALL_GPT} (default: see below)`),
  attention: choice('--attention <kind>', 'kind of attention (default: that of the config)', ['nsa', 'dense', 'both']),
  seqLen: parsed('--seq-len <list>', 'sequence lengths, such as 512,2048', wholeNumbers(1)),
  batchSize: parsed('--batch-size <list>', 'sequences per micro-batch', wholeNumbers(1)),
  kernel: parsed(
    '--kernel <list>',
    `kernels of the selected branch: ${SELECTION_KERNELS.join(', ')}`,
    selectionKernels,
  ),
  steps: parsed('--steps <n>', 'timed steps (default: as many as fit in ten seconds)', wholeNumber(1)),
  device: deviceOption(),
  threads: threadsOption(),
  quick: flag('--quick', `two steps, and length ${QUICK_LENGTH} by default`),
  profile: flag('--profile', 'also print the time of every kernel'),
  json: jsonOption(
    '{machine, device, threads, peak_gflops, rows: [{config, attention, kernel, S, batch, tokens_per_s, ms_step, mfu, mfu_palm, peak_mem_mib, params, layers, precision, hfu}]}',
  ),
  csv: csvOption(),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
A step is forward, backward, gradient norm and update on random tokens; three
steps warm up, the median of the others counts.
Without --config: the 125m shape (configs/base.yaml) with sparse and with dense
attention in fp32, and ${SMALL_GPT}, the model of bench/peers. On CUDA: the
125m shape in bf16 with the GPT-2 vocabulary, 65,536 tokens per step, at 512,
1024 and 2048 tokens with each kernel of the selected branch, then at 8192,
32768 and 65536. --seq-len and --batch-size change the sequences alone, not the
models or their precision. MFU counts 6 operations per matrix parameter and
token and the visible (query, key) pairs; mfu_palm (--json, --csv) counts
attention as dense and not causal; hfu counts what gradient checkpointing
computes again. All are relative to the measured peak. More: docs/benchmarks.md.
`;

export const configure = configured(OPTIONS, (options, io) => runBlocking(() => bench(options, io)), HELP);

interface TrainRow {
  readonly config: string;
  readonly attention: string;
  readonly kernel: string;
  readonly S: number;
  readonly batch: number;
  readonly tokens_per_s: number;
  readonly ms_step: number;
  readonly mfu: number;
  readonly mfu_palm: number;
  readonly peak_mem_mib: number;
  readonly params: number;
  readonly layers: number;
  readonly precision: string;
  /** As `mfu`, with the operations that gradient checkpointing repeats. */
  readonly hfu: number;
  /** With --profile only. */
  readonly profile?: readonly ProfileRow[];
}

interface Measured {
  readonly name: string;
  readonly time: StepTime;
  readonly profile: ProfileRow[] | null;
}

function bench(options: Options, io: Io): void {
  const { quick = false, profile = false } = options;
  const line = new ProgressLine(io);
  const lengths = options.seqLen ?? (quick ? [QUICK_LENGTH] : undefined);
  const choice = { config: options.config, attention: options.attention, lengths, batchSizes: options.batchSize };
  const device = openDevice(options);
  const cases = trainCases({ ...choice, device: device.kind, kernels: options.kernel }, io.env);
  const budget = stepBudget(options.steps, quick);
  const before = measureDevicePeak(device);
  const measured = cases.map((benchCase, i) => {
    line.show(`${i + 1}/${cases.length} ${benchCase.name}, S ${benchCase.config.train.seq_len}`);
    return measureCase(device, benchCase, budget, profile);
  });
  line.clear();
  // Measured twice, because another process may have slowed the first one down.
  const peak = Math.max(before, measureDevicePeak(device));
  const result = {
    machine: `${device.name}, ${availableParallelism()} cores`,
    device: device.kind,
    threads: isHostDevice(device) ? device.threads : 0,
    peak_gflops: fixed(peak / 1e9, 1),
    rows: measured.map((one) => rowOf(one, peak)),
  };
  if (options.json) printJson(io, result);
  else if (options.csv) io.out(formatCsv(COLUMNS, result.rows));
  else {
    const { machine, threads, peak_gflops, rows } = result;
    const count = threads === 0 ? '' : ` ${plural(threads, 'thread')},`;
    io.out(`${machine};${count} measured peak ${peak_gflops} GFLOP/s\n`);
    io.out(rowTable(rows, io.width));
    for (const row of rows) if (row.profile) io.out(profileTable(row, row.profile));
  }
}

function stepBudget(steps: number | undefined, quick: boolean): StepBudget {
  if (steps !== undefined) return { least: steps, ms: 0 };
  return quick ? { least: 2, ms: 0 } : { least: 5, ms: 10_000 };
}

function measureCase(device: Device, benchCase: TrainCase, budget: StepBudget, profile: boolean): Measured {
  const { name } = benchCase;
  const measured = () => benchTraining(device, benchCase, budget);
  if (!profile) return { name, time: measured(), profile: null };
  if (device instanceof CudaDevice) return { name, time: measured(), profile: profileCudaStep(device, benchCase) };
  const timed = new TimedDevice(device, kernelFlops(caseShape(benchCase), caseLengths(benchCase)));
  let rows: ProfileRow[] = [];
  const time = benchTraining(timed, benchCase, budget, {
    onWarm: () => timed.restart(),
    onDone: (steps) => {
      rows = timed.rows(steps);
    },
  });
  return { name, time, profile: rows };
}

function rowOf({ name, time, profile }: Measured, peak: number): TrainRow {
  const seconds = time.ms / 1000;
  const { attention, kernel, S, batch, params, layers, precision, flops } = time;
  const share = (operations: number) => fixed(operations / seconds / peak, 4);
  return {
    config: name,
    attention,
    kernel,
    S,
    batch,
    tokens_per_s: fixed((batch * S) / seconds, 1),
    ms_step: fixed(time.ms, 3),
    mfu: share(flops.used),
    mfu_palm: share(flops.palm),
    peak_mem_mib: fixed(time.peakBytes / MIB, 1),
    params,
    layers,
    precision,
    hfu: share(flops.executed),
    ...(profile ? { profile } : {}),
  };
}

const COLUMNS = [
  ...(['config', 'attention', 'kernel', 'S', 'batch', 'tokens_per_s', 'ms_step', 'mfu', 'mfu_palm'] as const),
  ...(['peak_mem_mib', 'params', 'layers', 'precision', 'hfu'] as const),
];

function rowTable(rows: readonly TrainRow[], width: number): string {
  return formatTable(
    [wrapped('config'), 'attn', 'kernel', ...right('S', 'batch', 'tok/s', 'ms/step', 'MFU', 'peak MiB')],
    rows.map((row) => [
      ...[row.config, row.attention, row.kernel, String(row.S), String(row.batch)],
      ...[row.tokens_per_s.toFixed(0), row.ms_step.toFixed(1), percent(row.mfu), row.peak_mem_mib.toFixed(0)],
    ]),
    width,
  );
}

function profileTable({ config, attention, S }: TrainRow, profile: readonly ProfileRow[]): string {
  const table = formatTable(
    ['kernel', ...right('calls', 'ms', 'share', 'GFLOP/s')],
    profile.map(({ name, calls, ms, share, gflops }) => [
      ...[name, String(calls), ms.toFixed(2), percent(share), gflops === null ? '' : gflops.toFixed(0)],
    ]),
  );
  return `One step of ${config}, ${attention}, S ${S}:\n${table}`;
}

function percent(share: number): string {
  return `${(100 * share).toFixed(1)} %`;
}
