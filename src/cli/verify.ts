/** `trefoil verify`: checks every invariant of the attention mathematics on every device of this machine. */

import type { Device } from '../device/device.js';
import { ExitCode } from '../errors.js';
import { defaultJobs, verifyInProcesses } from '../verify/jobs.js';
import { absentRow, checksFor, summarize, type VerifyRow, type VerifySummary, verifyDevice } from '../verify/verify.js';
import { runBlocking } from './shared/blocking.js';
import { deviceOption, listDevices } from './shared/device.js';
import { type Io, ProgressLine, printJson, yieldToSignals } from './shared/io.js';
import {
  configured,
  flag,
  jsonOption,
  type OptionValues,
  parsed,
  threadsOption,
  wholeNumber,
} from './shared/options.js';
import { formatTable, right, wrapped } from './shared/table.js';

const OPTIONS = {
  device: deviceOption('device to check; auto = all of this machine'),
  full: flag('--full', 'add sequences of 64k tokens and a longer training run; minutes and 8 GB'),
  jobs: parsed(
    '--jobs <n>',
    'checks at the same time (default: CPU 1, CUDA as cores and memory allow)',
    wholeNumber(1),
  ),
  threads: threadsOption(),
  json: jsonOption('{passed, failed, skipped, rows: [{device, invariant, case, ok, error, limit, reason}]}'),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
Checks (numbered as in docs/explain/attention.md):
  1 kernels equal the float64 reference
  2 outputs do not depend on future tokens, bit for bit
  3 a prefix computed alone equals the same tokens of the whole
  4 a packed batch equals its sequences
  5 equals dense attention where every key is visible
  6 gradients equal finite differences
  7 random tokens cannot be learned
  8 two runs are equal, bit for bit
  9 edge cases of shapes
The error is the relative distance |a-b|/|b|, or the number of values that
differ where the limit is 0.
Exit code: 0 all checks passed, 1 a check failed.
`;

export const configure = configured(OPTIONS, verify, HELP);

async function verify(options: Options, io: Io): Promise<void> {
  const started = performance.now();
  const { present, absent } = listDevices(options);
  const progress = new ProgressLine(io);
  const rows: VerifyRow[] = [];
  for (const device of present) rows.push(...(await verifyOne(device, options, progress)));
  progress.clear();
  const summary = summarize([...rows, ...absent.map(({ kind, reason }) => absentRow(kind, reason))]);
  if (options.json) printJson(io, summary);
  else io.out(verifyReport(summary, performance.now() - started, io));
  if (summary.failed > 0) io.exitCode = ExitCode.failed;
}

async function verifyOne(device: Device, options: Options, progress: ProgressLine): Promise<VerifyRow[]> {
  const { full = false, threads } = options;
  const checks = checksFor(device, full);
  const show = (count: number, { invariant, case: name }: Pick<VerifyRow, 'invariant' | 'case'>) =>
    progress.show(`${device.kind} ${count}/${checks.length} ${invariant}: ${name}`);
  const jobs = options.jobs ?? defaultJobs(device);
  if (jobs > 1)
    return verifyInProcesses(checks, jobs, { device: device.kind, full, threads }, (row, done) => show(done, row));
  const rows: VerifyRow[] = [];
  for (const [index, check] of checks.entries()) {
    show(index + 1, check);
    await yieldToSignals();
    rows.push(...runBlocking(() => verifyDevice(device, [check])));
  }
  return rows;
}

/** The table and a summary line. */
export function verifyReport(
  summary: VerifySummary,
  ms: number,
  { style, width }: Pick<Io, 'style' | 'width'>,
): string {
  const { passed, failed, skipped, rows } = summary;
  const mark = failed > 0 ? style.red : style.green;
  const total = `${passed} passed, ${failed} failed, ${skipped} skipped in ${(ms / 1000).toFixed(1)} s`;
  return `${table(rows, width)}\n${mark(total)}`;
}

function table(rows: readonly VerifyRow[], width: number): string {
  return formatTable(
    ['device', 'invariant', wrapped('case'), ...right('error', 'limit'), wrapped('result')],
    rows.map((row) => [row.device, row.invariant, row.case, number(row.error), number(row.limit), verdict(row)]),
    width,
  );
}

function verdict({ ok, reason }: VerifyRow): string {
  if (ok) return 'ok';
  return `${ok === null ? 'skipped' : 'FAILED'}: ${reason}`;
}

function number(value: number | null): string {
  if (value === null) return '-';
  return Number.isInteger(value) ? String(value) : value.toExponential(1);
}
