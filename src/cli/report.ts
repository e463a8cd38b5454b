/** `trefoil report`: writes a report of one or several runs. */
import { join } from 'node:path';
import { buildReport, writeReport } from '../dashboard/report/report.js';
import { resolveThresholds } from '../watch/thresholds.js';
import { type Io, printJson } from './shared/io.js';
import { configured, flag, jsonOption, type OptionValues, parsed, required } from './shared/options.js';

const OPTIONS = {
  dir: required('--dir <folder...>', 'run folders'),
  out: flag('--out <folder|file>', 'folder, or a file .html, .md or .json (default: report/ in the first run)'),
  title: parsed('--title <text>', 'heading of the report', String, 'Training report'),
  json: jsonOption(
    '{title, generated, runs, matrix: [{S, mode, run, ms_step, tokens_per_s, peak_mem_mib}], deviations}',
  ),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
A folder receives report.html, report.md with its plots as SVG files, and
report.json with all the data. report.html has the charts of the dashboard, to
zoom and to compare. It is self-contained: it loads nothing, works without a
network, and can be sent as one file. --out FILE.html, FILE.md or FILE.json
writes only that file; Markdown alone has no plots.

Example:
  trefoil report --dir artifacts/s512 artifacts/s1024 --out report.html
`;

export const configure = configured(OPTIONS, writeAll, HELP);

async function writeAll({ dir, out, title, json }: Options, io: Io): Promise<void> {
  const report = buildReport(dir, title);
  const files = await writeReport(report, out ?? join(dir[0], 'report'), resolveThresholds(io.env));
  if (json) printJson(io, report);
  for (const file of files) (json ? io.err : io.out)(`wrote ${file}`);
}
