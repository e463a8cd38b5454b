/**
 * The HTML file of a report: the document, and the dashboard's own charts with the data they draw. It is complete in itself:
 * its policy allows this one script and this one style sheet, by their hashes, and no request.
 */
import { createHash } from 'node:crypto';
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { TrefoilError, UsageError } from '../../errors.js';
import { toJson } from '../../run/json.js';
import { runPaths } from '../../run/paths.js';
import type { Thresholds } from '../../watch/thresholds.js';
import type { ReportRun } from '../answers.js';
import { webFolder } from '../assets.js';
import { Buckets } from '../buckets.js';
import { type ChartData, encodeChartData, type LogName } from '../chart-data.js';
import { namedMetrics } from '../named-metrics.js';
import { readOverview } from '../overview.js';
import { readJson, readRecords } from '../run-files.js';
import { RunLog } from '../run-log.js';
import { Runs } from '../runs.js';
import { escapeXml } from './svg.js';

/** Buckets of a log: about 0.5 MB of a report for each long run. */
const CAPACITY = 1024;
/** Steps at which statistics of attention and samples are shown. */
const RECORDS = 200;

/** Reads the parts of a run that the page shows. A file that cannot be read is named among its problems. */
export async function reportRun(dir: string, name: string, thresholds: Thresholds): Promise<ReportRun> {
  const runs = new Runs(dir, thresholds);
  const overview = await readOverview(runs, { name, dir: runs.dir });
  const { row, health, damaged, marks, tokensPerStep } = overview;
  const paths = runPaths(runs.dir);
  const problems = [...row.problems];
  const orNothing = async <Value>(read: () => Value | Promise<Value>, nothing: Value): Promise<Value> => {
    if (row.state === 'broken') return nothing;
    try {
      return await read();
    } catch (error) {
      if (!(error instanceof TrefoilError)) throw error;
      problems.push(runs.hidePaths(error.message));
      return nothing;
    }
  };
  const columns = async (kind: LogName, path: string) => {
    const log = new RunLog(path, kind, CAPACITY);
    await orNothing(() => log.catchUp(), undefined);
    return encode(log.chartData());
  };
  const named = async (path: string) =>
    encode(await orNothing(() => namedMetrics(path), new Buckets([], 1).chartData(0, 0, 0, 0)));
  const records = (path: string) => orNothing(async () => thin(await readRecords(path)), []);
  return {
    ...{ name, summary: row.summary, health, problems, damaged, marks, tokensPerStep },
    columns: {
      heartbeat: await columns('heartbeat', paths.heartbeat(0)),
      training: await columns('training', paths.training),
      val: await columns('val', paths.val),
      own: await named(paths.ownMetrics),
      source: await named(paths.sourceMetrics),
    },
    attention: await records(paths.attention),
    needle: await orNothing(() => readJson(join(runs.dir, 'needle.json')), null),
    samples: await records(paths.samples),
  };
}

function encode(data: ChartData): string {
  return Buffer.from(encodeChartData(withoutEmptyColumns(data))).toString('base64');
}

function withoutEmptyColumns(data: ChartData): ChartData {
  const hasValues = (name: string) => data.values.get(name)!.last.some((value) => !Number.isNaN(value));
  return { ...data, columns: data.columns.filter(hasValues) };
}

/** Evenly spaced records, including the last. */
function thin<Item>(items: readonly Item[]): Item[] {
  const stride = Math.ceil(items.length / RECORDS);
  return items.filter((_, i) => (items.length - 1 - i) % stride === 0);
}

/** The file of the report. `body` is HTML that was made here, with all texts escaped. */
export function htmlPage(title: string, body: string, runs: readonly ReportRun[]): string {
  const [script, style] = ['report.js', 'app.css'].map(readAsset);
  const policy = [
    "default-src 'none'",
    `script-src ${hashOf(script)}`,
    `style-src ${hashOf(style)}`,
    "base-uri 'none'",
    "form-action 'none'",
  ].join('; ');
  // As data, `<` cannot end the element or start a comment.
  const data = toJson(runs).replaceAll('<', '\\u003c');
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="${policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>${escapeXml(title)}</title>
<style>${style}</style>
</head>
<body>
<header class="bar"><span class="brand">${LEAF}Trefoil</span><span class="crumb">report</span><span id="switch"></span></header>
<main class="report">
${body}
</main>
<script type="application/json" id="data">${data}</script>
<script type="module">${script}</script>
</body>
</html>
`;
}

/** The trefoil, as in web/ui.tsx. */
const LEAF =
  '<svg viewBox="0 0 32 32" width="24" height="24" aria-hidden="true"><g fill="none" stroke="currentColor" stroke-width="1.8"><circle cx="16" cy="9.5" r="6"/><circle cx="9.3" cy="19.5" r="6"/><circle cx="22.7" cy="19.5" r="6"/><path d="M16 17v12" stroke-linecap="round"/></g></svg>';

function readAsset(name: string): string {
  const url = new URL(name, webFolder());
  if (!existsSync(url)) throw new UsageError('the charts of the report are not built; run npm run build');
  return readFileSync(url, 'utf8');
}

function hashOf(text: string): string {
  return `'sha256-${createHash('sha256').update(text).digest('base64')}'`;
}
