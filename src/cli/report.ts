/** `trefoil report`: runs as a document. */
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
    .addOption(new Option('--dir <folder...>', 'folders of the runs').makeOptionMandatory())
    .addOption(
      new Option(
        '--out <folder>',
        'where to write report.md, report.json and the plots (default: report/ in the first run)',
      ),
    )
    .addOption(new Option('--title <text>', 'heading of the report').default('Training report'))
    .addOption(jsonOption())
    .action((options: Options) => writeAll(options, io));
}

function writeAll({ dir, out, title, json }: Options, io: Io): void {
  const report = buildReport(dir, title);
  const files = writeReport(report, out ?? join(dir[0], 'report'));
  if (json) printJson(io, report);
  for (const file of files) (json ? io.err : io.out)(`wrote ${file}`);
}
