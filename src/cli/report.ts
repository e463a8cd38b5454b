/** `trefoil report`: writes a report of one or several runs. */
import { join } from 'node:path';
import { type Command, Option } from 'commander';
import { buildReport, writeReport } from '../watch/report/report.js';
import { type Io, printJson } from './shared/io.js';
import { jsonOption } from './shared/options.js';

interface Options {
  readonly dir: string[];
  readonly out?: string;
  readonly title: string;
  readonly json?: boolean;
}

export function configure(command: Command, io: Io): void {
  command
    .addOption(new Option('--dir <folder...>', 'run folders').makeOptionMandatory())
    .addOption(
      new Option(
        '--out <folder|file.html>',
        'folder for the report, or one HTML file (default: report/ in the first run)',
      ),
    )
    .addOption(new Option('--title <text>', 'heading of the report').default('Training report'))
    .addOption(
      jsonOption('{title, generated, runs, matrix: [{S, mode, run, ms_step, tokens_per_s, peak_mem_mib}], deviations}'),
    )
    .addHelpText('after', HELP)
    .action((options: Options) => writeAll(options, io));
}

const HELP = `
A folder receives report.html, report.md with its plots as SVG files, and
report.json with all the data. report.html is self-contained: the plots are
inside, it loads nothing, and it can be sent as one file. --out FILE.html writes
only that file.

Example:
  trefoil report --dir artifacts/s512 artifacts/s1024 --out report.html
`;

function writeAll({ dir, out, title, json }: Options, io: Io): void {
  const report = buildReport(dir, title);
  const files = writeReport(report, out ?? join(dir[0], 'report'));
  if (json) printJson(io, report);
  for (const file of files) (json ? io.err : io.out)(`wrote ${file}`);
}
