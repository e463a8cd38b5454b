/** A report of one or several runs: one HTML file with the dashboard's charts, Markdown with plots as files, and JSON. */
import { dirname, extname, join, relative } from 'node:path';
import { UsageError } from '../../errors.js';
import { ensureFolder, fileError, namesFile, writeFileAtomic } from '../../files.js';
import { toJson } from '../../run/json.js';
import { runPaths } from '../../run/paths.js';
import type { Thresholds } from '../../watch/thresholds.js';
import { collectRun, plain, type RunReport } from './collect.js';
import { type Cell, type DocumentElement, toHtml, toMarkdown } from './document.js';
import { htmlPage, reportRun } from './page.js';
import { lineChart, type Series } from './svg.js';

export interface MatrixRow {
  readonly S: number;
  readonly mode: string;
  readonly run: string;
  readonly ms_step: number;
  readonly tokens_per_s: number;
  readonly peak_mem_mib: number | null;
}

/** The JSON of `report`. */
export interface Report {
  readonly title: string;
  readonly generated: string;
  readonly runs: readonly RunReport[];
  readonly matrix: readonly MatrixRow[];
  /** Differences between the runs that the table does not show. */
  readonly deviations: readonly string[];
}

export function buildReport(dirs: readonly string[], title: string): Report {
  const runs = dirs.map(collectRun);
  const empty = runs.find(({ step }) => step === null);
  if (empty) throw new UsageError(`${empty.dir}: has no heartbeats; give the folder of a run that has started`);
  const matrix = runs.flatMap(({ S, mode, run, ms_step: ms, tokens_per_s: rate, peak_mem_mib: peak }) =>
    S === null || ms === null || rate === null
      ? []
      : [{ S, mode, run, ms_step: ms, tokens_per_s: rate, peak_mem_mib: peak }],
  );
  const differing = (name: string, of: (run: RunReport) => unknown) =>
    new Set(runs.map((run) => JSON.stringify(of(run)))).size > 1 ? [`the runs differ in ${name}`] : [];
  return {
    title,
    generated: new Date().toISOString(),
    runs,
    matrix: matrix.sort((a, b) => a.S - b.S || (a.mode < b.mode ? -1 : 1)),
    deviations: [
      ...differing('commit', ({ environment }) => (environment?.['git'] as { commit?: string } | null)?.commit),
      ...differing('machine', ({ environment }) => environment?.['machine']),
      ...differing('device', ({ environment }) => environment?.['device']),
      ...differing('model', ({ config }) => [config?.model.dim, config?.model.n_layers, config?.model.n_heads]),
    ],
  };
}

/** The file formats of a report. */
const FORMATS = ['.html', '.htm', '.md', '.json'];

/**
 * Writes the report and returns the paths of the files. If `out` ends in .html, .md or .json, that one file; else
 * report.html, report.md, report.json and the plots into the folder `out`.
 */
export async function writeReport(report: Report, out: string, thresholds: Thresholds): Promise<string[]> {
  const isFile = namesFile(out);
  const format = extname(out).toLowerCase();
  if (isFile && !FORMATS.includes(format))
    throw new UsageError(`--out ${out}: a report is a folder, or a file ending in .html, .md or .json`);
  const folder = isFile ? dirname(out) : out;
  try {
    ensureFolder(folder);
  } catch (error) {
    throw fileError('create', folder, error);
  }
  const plots = plotsOf(report);
  const elements = elementsOf(report, plots, folder);
  const names = uniqueNames(report.runs);
  const runs = await Promise.all(report.runs.map(({ dir }, i) => reportRun(dir, names[i], thresholds)));
  const html = htmlPage(report.title, toHtml(elements), runs);
  const json = `${toJson(report, 2)}\n`;
  const one = () =>
    format === '.md' ? toMarkdown(elements.filter((element) => !isCurves(element))) : format === '.json' ? json : html;
  const files: [string, string][] = isFile
    ? [[out, one()]]
    : [
        [join(folder, 'report.html'), html],
        [join(folder, 'report.md'), toMarkdown(elements)],
        [join(folder, 'report.json'), json],
        ...plots.map(({ file, svg }): [string, string] => [join(folder, file), `${svg}\n`]),
      ];
  return files.map(([path, content]) => {
    writeFileAtomic(path, content);
    return path;
  });
}

/** The curves are files of their own, which a single Markdown file does not have. */
function isCurves(element: DocumentElement): boolean {
  return 'charts' in element || ('heading' in element && element.heading === CURVES);
}

const CURVES = 'Curves';

interface Plot {
  readonly file: string;
  readonly title: string;
  readonly svg: string;
}

function plotsOf({ runs }: Report): Plot[] {
  const names = uniqueNames(runs);
  const of = (pick: (run: RunReport) => Series['points']) =>
    runs.map((run, i) => ({ name: names[i], points: pick(run) }));
  const validation = runs.flatMap((run, i) =>
    run.series.val_loss.length > 0 ? [{ name: `${names[i]} validation`, points: run.series.val_loss }] : [],
  );
  const plot = (file: string, title: string, y: string, series: readonly Series[], fromZero = true): Plot => ({
    file,
    title,
    svg: lineChart({ title, x: 'step', y, series, fromZero }),
  });
  const simple = (file: string, title: string, y: string, pick: (run: RunReport) => Series['points']) =>
    plot(file, title, y, of(pick));
  return [
    plot('loss.svg', 'Loss', 'nats per token', [...of((run) => run.series.loss), ...validation], false),
    simple('throughput.svg', 'Throughput', 'tokens per second', (run) => run.series.toks_per_s),
    simple('gate_entropy.svg', 'Gate entropy', 'mean, nats', (run) => run.series.gate_entropy),
    ...runs.map((run, i) =>
      plot(
        runs.length === 1 ? 'gate_shares.svg' : `gate_shares_${i + 1}.svg`,
        `Gates of ${names[i]}`,
        'share of a branch',
        ['compressed', 'selected', 'window'].map((name, branch) => ({ name, points: run.series.gate_shares[branch] })),
      ),
    ),
    simple('fetch.svg', 'Fetch', 'milliseconds', (run) => run.series.fetch_ms),
    simple('memory.svg', 'Memory', 'MiB reserved', (run) => run.series.memory_mib),
  ];
}

/** Names of the runs; a number tells folders of the same name apart. */
function uniqueNames(runs: readonly RunReport[]): string[] {
  return runs.map(({ run }, i) => {
    const before = runs.slice(0, i).filter((other) => other.run === run).length;
    return before === 0 ? run : `${run} (${before + 1})`;
  });
}

function elementsOf(report: Report, plots: readonly Plot[], folder: string): DocumentElement[] {
  const { title, generated, runs } = report;
  const names = uniqueNames(runs);
  const deviations = [
    ...report.deviations,
    ...runs.flatMap((run, i) => run.deviations.map((line) => `${names[i]}: ${line}`)),
  ];
  return [
    { heading: title, level: 1 },
    { paragraph: `Written ${generated} by trefoil report.` },
    { heading: 'Runs', level: 2 },
    table(
      ['run', 'state', 'step', 'loss', 'val loss', 'ms/step', 'tok/s', 'mfu', 'peak MiB (tensors)', 'fetch p50/p95 ms'],
      runs.map((run, i) => [
        names[i],
        run.state,
        `${run.step}/${run.steps ?? '?'}`,
        `${number(run.first_loss, 4)} → ${number(run.last_loss, 4)}`,
        number(run.val_loss, 4),
        number(run.ms_step, 1),
        number(run.tokens_per_s, 0),
        run.mfu === null ? '-' : `${(100 * run.mfu).toFixed(1)} %`,
        `${number(run.peak_mem_mib, 0)} (${number(run.peak_tensors_mib, 0)})`,
        `${number(run.fetch_p50_ms, 1)} / ${number(run.fetch_p95_ms, 1)}`,
      ]),
    ),
    { heading: 'Sequence length and mode', level: 2 },
    matrixTable(report.matrix),
    { heading: 'Gates and selection', level: 2 },
    table(
      ['run', 'entropy (good > 0.5)', 'collapsed', 'shares cmp / sel / win', 'blocks selected', 'counters'],
      runs.map((run, i) => [
        names[i],
        number(run.gate_entropy_mean, 3),
        number(run.gate_collapse_frac, 4),
        run.gate_branch_shares?.map((share) => share.toFixed(2)).join(' / ') ?? '-',
        number(run.sel_k_mean, 1),
        Object.entries(run.counters)
          .map(([name, count]) => `${name} ${count}`)
          .join(', ') || '-',
      ]),
    ),
    { heading: CURVES, level: 2 },
    { charts: plots },
    { heading: 'Deviations', level: 2 },
    deviations.length > 0 ? { list: deviations } : { paragraph: 'None.' },
    ...runs.flatMap((run, i) => runElements(run, names[i], folder)),
  ];
}

/** Environment and config of one run, and links to its files. */
function runElements(run: RunReport, name: string, folder: string): DocumentElement[] {
  const { environment, config } = run;
  const part = <Value>(key: string) => environment?.[key] as Value | null | undefined;
  const git = part<{ commit: string; branch: string }>('git');
  const machine = part<Record<string, unknown>>('machine');
  const device = part<Record<string, unknown>>('device');
  const source = part<Record<string, unknown>>('kernel_source');
  const ranks = part<{ world: number; launcher: string }>('ranks');
  const versions = Object.entries(part<Record<string, unknown>>('versions') ?? {});
  const paths = runPaths(run.dir);
  const files = [paths.training, paths.val, paths.heartbeat(0), paths.metrics, paths.env, paths.config];
  const { model, nsa, train, runtime, data } = config ?? {};
  const rows: [string, unknown][] = [
    ['branch', git?.branch],
    ['commit', git?.commit],
    [
      'machine',
      machine &&
        `${plain(machine['cpu'])}, ${plain(machine['cores'])} cores, ${plain(machine['memory_mib'])} MiB, ${plain(machine['platform'])}`,
    ],
    ['device', device && `${plain(device['kind'])}: ${plain(device['name'])}`],
    [
      'CPU kernels',
      source &&
        `${plain(source['kind'])}: ${plain(source['name'])}, products ${source['fused'] === true ? 'fused' : 'not fused'}, sources ${plain(source['hash'])}`,
    ],
    ['attention kernels', part<string>('kernels')],
    ...(ranks ? [['ranks', `${plain(ranks.world)}, started by ${plain(ranks.launcher)}`] as [string, string]] : []),
    ['versions', versions.map(([key, value]) => `${key} ${plain(value)}`).join(', ')],
    [
      'model',
      model &&
        `${model.attention}: dim ${model.dim}, ${model.n_layers} layers, ${model.n_heads} heads, ${model.n_kv_groups} groups`,
    ],
    ['sparse attention', nsa && `l ${nsa.l}, d ${nsa.d}, l_sel ${nsa.l_sel}, n_sel ${nsa.n_sel}, w ${nsa.w}`],
    [
      'training',
      train &&
        `S ${train.seq_len}, batch ${train.batch_size} x ${train.accumulate_grad_batches}, ${runtime?.precision}, lr ${train.lr}`,
    ],
    ['data', data && `${data.source}, tokenizer ${data.tokenizer}`],
  ];
  return [
    { heading: name, level: 2 },
    table(
      ['what', 'value'],
      rows.map(([key, value]) => [key, value ? plain(value) : '-']),
    ),
    {
      paragraph: 'Files: ',
      links: files.map((file) => ({ text: file.split('/').at(-1) ?? '', path: relative(folder, file) })),
    },
  ];
}

/** One row per length, one column per mode; a cell has a line for each run. */
function matrixTable(matrix: readonly MatrixRow[]): DocumentElement {
  const modes = [...new Set(matrix.map(({ mode }) => mode))];
  const lengths = [...new Set(matrix.map(({ S }) => S))];
  if (matrix.length === 0) return { paragraph: 'No run has a config and a heartbeat.' };
  const line = (row: MatrixRow) =>
    `${row.ms_step.toFixed(1)}, ${row.tokens_per_s.toFixed(0)}, ${number(row.peak_mem_mib, 0)}`;
  return table(
    ['S', ...modes.map((mode) => `${mode}: ms/step, tok/s, peak MiB`)],
    lengths.map((length) => [
      String(length),
      ...modes.map((mode) => {
        const lines = matrix.filter((row) => row.S === length && row.mode === mode).map(line);
        return lines.length > 0 ? lines : '-';
      }),
    ]),
  );
}

function table(head: readonly string[], rows: readonly (readonly Cell[])[]): DocumentElement {
  return { table: { head, rows } };
}

function number(value: number | null, digits: number): string {
  return value === null ? '-' : value.toFixed(digits);
}
