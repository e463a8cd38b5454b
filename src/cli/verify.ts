/** `trefoil verify`: every invariant of the mathematics, on every device of this machine. */
import { type Command, Option } from 'commander';
import { ExitCode } from '../errors.js';
import { absentRow, checksFor, type Row, type Summary, summarize, verifyDevice } from '../verify/verify.js';
import { type DeviceChoice, deviceOption, listDevices } from './shared/device.js';
import { type Io, ProgressLine, printJson } from './shared/io.js';
import { jsonOption, threadsOption } from './shared/options.js';
import { formatTable } from './shared/table.js';

interface Options {
  readonly device: DeviceChoice;
  readonly full?: boolean;
  readonly json?: boolean;
  readonly threads?: number;
}

export function configure(command: Command, io: Io): void {
  command
    .addOption(deviceOption('which device to check; auto = all there are'))
    .addOption(new Option('--full', 'also long sequences (64k tokens) and a longer training; minutes and 8 GB'))
    .addOption(threadsOption())
    .addOption(jsonOption())
    .addHelpText('after', HELP)
    .action((options: Options) => verify(options, io));
}

const HELP = `
Checks (numbers as in docs/explain/attention.md):
  1 equal to the float64 reference     2 the future cannot matter, bit by bit
  3 a prefix alone equals the whole    4 a packed batch equals its sequences
  5 dense where everything is visible  6 gradients equal finite differences
  7 random tokens cannot be learned    8 two runs are equal, bit by bit
  9 shapes that bite
error is the relative distance ‖a-b‖/‖b‖, or how many values differ where the limit is 0.
Exit code: 0 all passed, 1 something failed.
`;

function verify(options: Options, io: Io): void {
  const started = performance.now();
  const { present, absent } = listDevices(options);
  const progress = new ProgressLine(io);
  const rows = present.flatMap((device) => {
    const checks = checksFor(device, options.full ?? false);
    return verifyDevice(device, checks, (check, index) =>
      progress.show(`${device.kind} ${index + 1}/${checks.length} ${check.invariant}: ${check.case}`),
    );
  });
  progress.clear();
  const summary = summarize([...rows, ...absent.map(({ kind, reason }) => absentRow(kind, reason))]);
  if (options.json) printJson(io, summary);
  else io.out(verifyReport(summary, performance.now() - started));
  if (summary.failed > 0) io.exitCode = ExitCode.failed;
}

/** The table, and a last line that says it all. */
export function verifyReport(summary: Summary, ms: number): string {
  const { passed, failed, skipped, rows } = summary;
  return `${table(rows)}\n${passed} passed, ${failed} failed, ${skipped} skipped in ${(ms / 1000).toFixed(1)} s`;
}

function table(rows: readonly Row[]): string {
  const right = 'right' as const;
  return formatTable(
    [
      { title: 'device' },
      { title: 'invariant' },
      { title: 'case' },
      { title: 'error', align: right },
      { title: 'limit', align: right },
      { title: 'ok' },
    ],
    rows.map((row) => [row.device, row.invariant, row.case, number(row.error), number(row.limit), verdict(row)]),
  );
}

function verdict({ ok, reason }: Row): string {
  if (ok) return 'ok';
  return `${ok === null ? 'skipped' : 'FAILED'}: ${reason}`;
}

function number(value: number | null): string {
  if (value === null) return '-';
  return Number.isInteger(value) ? String(value) : value.toExponential(1);
}
