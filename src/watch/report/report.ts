/** A report of one or several runs: Markdown, the plots it shows, and the same data as JSON. */
import { join, relative } from 'node:path';
import { UsageError } from '../../errors.js';
import { ensureFolder } from '../../folders.js';
import { fileError, writeFileAtomic } from '../../run/atomic.js';
import { toJson } from '../../run/json.js';
import { runPaths } from '../../run/paths.js';
import { collectRun, type RunReport } from './collect.js';
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
  /** What differs between the runs, beyond what the table compares. */
  readonly deviations: readonly string[];
}

export function buildReport(dirs: readonly string[], title: string): Report {
  const runs = dirs.map(collectRun);
  const empty = runs.find(({ step }) => step === null);
  if (empty) throw new UsageError(`${empty.dir}: has no heartbeats; name the folder of a run that has begun`);
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

/** Writes report.md, report.json and the plots into `folder`; returns their paths. */
export function writeReport(report: Report, folder: string): string[] {
  try {
    ensureFolder(folder);
  } catch (error) {
    throw fileError('create', folder, error);
  }
  const plots = plotsOf(report);
  const files: [string, string][] = [
    ['report.md', markdown(report, plots, folder)],
    ['report.json', `${toJson(report, 2)}\n`],
    ...plots.map(({ file, svg }): [string, string] => [file, `${svg}\n`]),
  ];
  return files.map(([name, content]) => {
    writeFileAtomic(join(folder, name), content);
    return join(folder, name);
  });
}

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
    ...{ file, title },
    svg: lineChart({ title, x: 'step', y, series, fromZero }),
  });
  return [
    plot('loss.svg', 'Loss', 'nats per token', [...of((run) => run.series.loss), ...validation], false),
    plot(
      'throughput.svg',
      'Throughput',
      'tokens per second',
      of((run) => run.series.toks_per_s),
    ),
    plot(
      'gate_entropy.svg',
      'Gate entropy',
      'mean, nats',
      of((run) => run.series.gate_entropy),
    ),
    ...runs.map((run, i) =>
      plot(
        runs.length === 1 ? 'gate_shares.svg' : `gate_shares_${i + 1}.svg`,
        `Gates of ${names[i]}`,
        'share of a branch',
        ['compressed', 'selected', 'window'].map((name, branch) => ({ name, points: run.series.gate_shares[branch] })),
      ),
    ),
    plot(
      'fetch.svg',
      'Fetch',
      'milliseconds',
      of((run) => run.series.fetch_ms),
    ),
    plot(
      'memory.svg',
      'Memory',
      'MiB reserved',
      of((run) => run.series.memory_mib),
    ),
  ];
}

/** Folders of the same name in different places are told apart by a number. */
function uniqueNames(runs: readonly RunReport[]): string[] {
  return runs.map(({ run }, i) => {
    const before = runs.slice(0, i).filter((other) => other.run === run).length;
    return before === 0 ? run : `${run} (${before + 1})`;
  });
}

function markdown(report: Report, plots: readonly Plot[], folder: string): string {
  const { title, generated, runs, deviations } = report;
  const names = uniqueNames(runs);
  return `${[
    `# ${title}`,
    `Written ${generated} by \`trefoil report\`; the same data is in [report.json](report.json).`,
    '## Runs',
    table(
      ['run', 'state', 'step', 'loss', 'val loss', 'ms/step', 'tok/s', 'mfu', 'peak MiB', 'fetch p50/p95 ms'],
      runs.map((run, i) => [
        names[i],
        run.state,
        `${run.step}/${run.steps ?? '?'}`,
        `${number(run.first_loss, 4)} → ${number(run.last_loss, 4)}`,
        number(run.val_loss, 4),
        number(run.ms_step, 1),
        number(run.tokens_per_s, 0),
        run.mfu === null ? '-' : `${(100 * run.mfu).toFixed(1)} %`,
        number(run.peak_mem_mib, 0),
        `${number(run.fetch_p50_ms, 1)} / ${number(run.fetch_p95_ms, 1)}`,
      ]),
    ),
    '## Sequence length and mode',
    matrixTable(report.matrix),
    '## Gates and selection',
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
    '## Plots',
    plots.map(({ file, title: name }) => `![${name}](${file})`).join('\n\n'),
    '## Deviations',
    [...deviations, ...runs.flatMap((run, i) => run.deviations.map((line) => `${names[i]}: ${line}`))]
      .map((line) => `- ${line}`)
      .join('\n') || 'None.',
    ...runs.map((run, i) => section(run, names[i], folder)),
  ].join('\n\n')}\n`;
}

function section(run: RunReport, name: string, folder: string): string {
  const { environment, config } = run;
  const git = environment?.['git'] as { commit: string; branch: string } | null | undefined;
  const machine = environment?.['machine'] as Record<string, unknown> | undefined;
  const device = environment?.['device'] as Record<string, unknown> | undefined;
  const ranks = environment?.['ranks'] as { world: number; launcher: string } | undefined;
  const versions = environment?.['versions'] as Record<string, string> | undefined;
  const paths = runPaths(run.dir);
  const files = [paths.training, paths.val, paths.heartbeat(0), paths.metrics, paths.env, paths.config];
  const shape =
    config &&
    `dim ${config.model.dim}, ${config.model.n_layers} layers, ${config.model.n_heads} heads, ${config.model.n_kv_groups} groups`;
  const sparse =
    config &&
    `l ${config.nsa.l}, d ${config.nsa.d}, l_sel ${config.nsa.l_sel}, n_sel ${config.nsa.n_sel}, w ${config.nsa.w}`;
  return [
    `## ${name}`,
    table(
      ['what', 'value'],
      [
        ['branch', git?.branch ?? '-'],
        ['commit', git?.commit ?? '-'],
        [
          'machine',
          machine
            ? `${machine['cpu']}, ${machine['cores']} cores, ${machine['memory_mib']} MiB, ${machine['platform']}`
            : '-',
        ],
        ['device', device ? `${device['kind']}: ${device['name']}` : '-'],
        ...(ranks ? [['ranks', `${ranks.world}, started by ${ranks.launcher}`]] : []),
        [
          'versions',
          versions
            ? Object.entries(versions)
                .map(([key, value]) => `${key} ${value}`)
                .join(', ')
            : '-',
        ],
        ['model', shape ? `${config.model.attention}: ${shape}` : '-'],
        ['sparse attention', sparse ?? '-'],
        [
          'training',
          config
            ? `S ${config.train.seq_len}, batch ${config.train.batch_size} x ${config.train.accumulate_grad_batches}, ${config.runtime.precision}, lr ${config.train.lr}`
            : '-',
        ],
        ['data', config ? `${config.data.source}, tokenizer ${config.data.tokenizer}` : '-'],
      ],
    ),
    `Files: ${files.map((file) => link(file, folder)).join(', ')}`,
  ].join('\n\n');
}

/** Lengths down, modes across; several runs of one kind stand one after the other. */
function matrixTable(matrix: readonly MatrixRow[]): string {
  const modes = [...new Set(matrix.map(({ mode }) => mode))];
  const lengths = [...new Set(matrix.map(({ S }) => S))];
  if (matrix.length === 0) return 'No run has a config and a heartbeat.';
  return table(
    ['S', ...modes.map((mode) => `${mode}: ms/step, tok/s, peak MiB`)],
    lengths.map((length) => [
      String(length),
      ...modes.map((mode) => {
        const cells = matrix.filter((row) => row.S === length && row.mode === mode);
        const cell = (row: MatrixRow) =>
          `${row.ms_step.toFixed(1)}, ${row.tokens_per_s.toFixed(0)}, ${number(row.peak_mem_mib, 0)}`;
        return cells.map(cell).join('<br>') || '-';
      }),
    ]),
  );
}

function table(head: readonly string[], rows: readonly (readonly string[])[]): string {
  const line = (cells: readonly string[]) => `| ${cells.map((cell) => cell.replace(/\|/g, '\\|')).join(' | ')} |`;
  return [line(head), line(head.map(() => '---')), ...rows.map(line)].join('\n');
}

function number(value: number | null, digits: number): string {
  return value === null ? '-' : value.toFixed(digits);
}

function link(file: string, folder: string): string {
  const path = relative(folder, file);
  return `[${path.split('/').at(-1)}](${encodeURI(path)})`;
}
