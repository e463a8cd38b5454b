// Figures of docs/explain/code-model.md: gathers the files of a run of examples/code-model, and writes tables and charts.
//
//   node bench/code-model.mjs collect FOLDER   FOLDER holds what docs/explain/code-model.md says: writes bench/results/code-model-run-h200.json
//   node bench/code-model.mjs collect-retrieval FOLDER   the same for a model and its fine-tune: bench/results/code-model-retrieval-h200.json
//   node bench/code-model.mjs page [--check]   fills the parts of the page between <!-- figures: NAME --> and <!-- end -->, and
//                                              writes docs/images/code-model-*.svg; with --check only says whether they are current
// Needs `npm run build`.
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parse } from 'yaml';
import { heatMap } from '../dist/dashboard/report/heat-map.js';
import { lineChart } from '../dist/dashboard/report/svg.js';
import { count, deviation, mean, median, percent, table, withFigures, writeOrCheck } from './markdown.mjs';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const RESULTS = join(root, 'bench', 'results', 'code-model-run-h200.json');
const RETRIEVAL = join(root, 'bench', 'results', 'code-model-retrieval-h200.json');
const EARLIER = join(root, 'bench', 'results', 'code-model-earlier-h200.json');
const QUALITY = join(root, 'bench', 'results', 'quality-h200.json');
const PAGE = join(root, 'docs', 'explain', 'code-model.md');
const image = (name) => join(root, 'docs', 'images', `code-model-${name}.svg`);
/** Points of a curve that are kept. */
const POINTS = 100;
/** Shorter contexts are not shown: a power of two of tokens each. */
const FIRST_POSITION = 1024;
const TASKS = ['passkey', 'key-value'];
const BRANCH_NAMES = { cmp: 'the compressed branch', sel: 'the selected branch', win: 'the window' };

const [command, argument] = process.argv.slice(2);
if (command === 'collect' && argument) collect(argument);
else if (command === 'collect-retrieval' && argument) collectRetrieval(argument);
else if (command === 'page') page(argument === '--check');
else throw new Error('usage: node bench/code-model.mjs collect FOLDER | collect-retrieval FOLDER | page [--check]');

/** Readers of the files in a folder. */
function filesOf(folder) {
  const path = (...names) => join(folder, ...names);
  return {
    path,
    json: (name) => (existsSync(path(name)) ? JSON.parse(readFileSync(path(name), 'utf8')) : undefined),
    csv: (name) =>
      readFileSync(path(name), 'utf8')
        .trim()
        .split('\n')
        .slice(1)
        .map((line) => line.split(',').map(Number)),
    lines: (name) =>
      readFileSync(path(name), 'utf8')
        .trim()
        .split('\n')
        .map((line) => JSON.parse(line)),
    settings: () =>
      (({ model, nsa, train }) => ({ model, nsa, train }))(parse(readFileSync(path('config.yaml'), 'utf8'))),
  };
}

/** Writes results without the paths of the machine. */
function write(file, result) {
  const kept = JSON.parse(
    JSON.stringify(result, (key, value) => (key === 'out_dir' || value?.startsWith?.('/') ? undefined : value)),
  );
  writeFileSync(file, `${compact(kept)}\n`);
  console.log(`wrote ${file}`);
}

function collectRetrieval(folder) {
  const { json, csv, lines, settings } = filesOf(folder);
  const retrieval = json('retrieval.json');
  write(RETRIEVAL, {
    machine: retrieval.device,
    settings: settings(),
    tokens_per_s: median(csv('training.csv').map((row) => row[3])),
    validation_loss: csv('val.csv').map(([step, loss]) => [step, loss]),
    attention: thinned(lines('attention.jsonl'), 5).map(({ ts: _ts, ...line }) => line),
    retrieval,
  });
}

function collect(folder) {
  const { path, json, csv, lines, settings } = filesOf(folder);
  const corpus = json('corpus.json');
  const metrics = json('metrics.json');
  const rows = csv('training.csv');
  const every = Math.max(1, Math.ceil(rows.length / POINTS));
  const { validation: val } = corpus;
  const result = {
    machine: metrics.device_name,
    corpus: { ...corpus, validation: { ...val, names: undefined, projects: val.names.length } },
    settings: settings(),
    parameters: metrics.parameters,
    steps: metrics.step,
    tokens: metrics.tokens_seen,
    tokens_per_s: median(rows.map((row) => row[3])),
    training_loss: rows.filter((_, i) => i % every === 0 || i === rows.length - 1).map(([step, loss]) => [step, loss]),
    validation_loss: csv('val.csv').map(([step, loss]) => [step, loss]),
    stopped_and_resumed: existsSync(path('train-1.txt'))
      ? /stopped after step \d+ by SIGTERM/.exec(readFileSync(path('train-1.txt'), 'utf8'))?.[0]
      : undefined,
    attention: thinned(lines('attention.jsonl'), 12).map(({ ts: _ts, ...line }) => line),
    branches: json('branches.json')?.models,
    positions_after_fine_tune: json('positions-after.json'),
    retrieval: json('retrieval.json'),
    retrieval_before_fine_tune: json('retrieval-0.json'),
    watchdog: existsSync(path('watch.txt'))
      ? readFileSync(path('watch.txt'), 'utf8')
          .split('\n')
          .filter((line) => line.includes('CRITICAL'))
          .map((line) => /CRITICAL \S+ (rank \d+: .*?\))/.exec(line)?.[1])
      : undefined,
    faults: json('faults.json'),
  };
  write(RESULTS, result);
}

function thinned(list, count) {
  if (list.length <= count) return list;
  return Array.from({ length: count }, (_, i) => list[Math.round((i * (list.length - 1)) / (count - 1))]);
}

/** JSON with lists of numbers on one line. */
function compact(value) {
  return JSON.stringify(value, null, 1).replace(/\[\s+(?:[-\d.e+]+,?\s*)+\]/g, (list) =>
    list.replace(/\s+/g, ' ').replace('[ ', '[').replace(' ]', ']'),
  );
}

function page(isCheck) {
  const run = JSON.parse(readFileSync(RESULTS, 'utf8'));
  const found = JSON.parse(readFileSync(RETRIEVAL, 'utf8'));
  const earlier = JSON.parse(readFileSync(EARLIER, 'utf8'));
  const { runs } = JSON.parse(readFileSync(QUALITY, 'utf8'));
  const seeds = runs.find(({ name }) => name === 'NSA and dense, 32,768 tokens').rows;
  const parts = {
    corpus: corpusTable(run),
    training: trainingTable(run),
    seeds: seedTable(seeds, 200),
    time: seedTable(seeds, 490),
    positions: positionTable(run),
    branches: branchTable(run),
    gates: gateTable(run),
    retrieval: retrievalTable(found),
    stages: stageTable(found),
    earlier: earlierTable(run, earlier, found),
    faults: faultTable(run),
  };
  const figures = Object.entries(charts(run, found)).map(([name, svg]) => [image(name), `${svg}\n`]);
  writeOrCheck([[PAGE, withFigures(PAGE, parts)], ...figures], isCheck);
}

function charts(run, { retrieval }) {
  return {
    loss: lineChart({
      title: 'Loss during training',
      x: 'step',
      y: 'nats per token',
      series: [
        { name: 'training', points: run.training_loss },
        { name: 'validation', points: run.validation_loss },
      ],
    }),
    positions: lineChart({
      title: 'Validation loss by tokens of context',
      x: 'log2 of the tokens of context',
      y: 'nats per token',
      series: run.branches
        .filter(({ without }) => without !== 'win')
        .map(({ without, by_position: rows }) => ({
          name: without === undefined ? 'all branches' : `without ${without}`,
          points: rows.filter(({ to }) => to >= 64).map(({ to, loss }) => [Math.log2(to), loss]),
        })),
    }),
    gates: lineChart({
      title: 'Share of each branch in the gates, mean of all layers',
      x: 'step',
      y: 'share',
      series: Object.keys(BRANCH_NAMES).map((branch) => ({
        name: branch,
        points: run.attention.map((line) => [line.step, mean(line[branch])]),
      })),
    }),
    layers: layerChart(run),
    passkey: retrievalChart(retrieval, 'passkey'),
    'key-value': retrievalChart(retrieval, 'key-value'),
  };
}

/** Share of each branch by layer, at some steps from the first telemetry after the start to the last. */
function layerChart({ attention }) {
  const lines = thinned(attention.slice(1), 4);
  return heatMap({
    ...{ title: 'Share of each branch in the gates, by layer and step', x: 'step', y: 'layer' },
    columns: lines.map(({ step }) => count(step)),
    rows: lines[0].cmp.map((_, layer) => String(layer + 1)),
    tables: Object.entries({ cmp: 'compressed', sel: 'selected', win: 'window' }).map(([branch, title]) => ({
      title,
      values: lines[0].cmp.map((_, layer) => lines.map((line) => line[branch][layer])),
    })),
  });
}

function retrievalChart({ rows }, task) {
  const lengths = lengthsOf({ rows });
  const depths = [...new Set(rows.map(({ depth }) => depth))].sort((a, b) => a - b);
  const tables = [null, 'sel'].map((without) => ({
    title: without === null ? 'all branches' : `without ${without}`,
    values: depths.map((depth) =>
      lengths.map(
        (length) =>
          rows.find(
            (row) => row.task === task && row.without === without && row.length === length && row.depth === depth,
          )?.accuracy ?? Number.NaN,
      ),
    ),
  }));
  return heatMap({
    ...{ title: `Values found in code (${task}), by depth and length`, x: 'tokens', y: 'depth', tables },
    ...{ columns: lengths.map(String), rows: depths.map((depth) => `${Math.round(100 * depth)} %`) },
  });
}

function corpusTable({ corpus: { found, train, validation } }) {
  const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;
  return table(
    ['', 'projects', 'files', 'text'],
    [
      ['found, without duplicates', found.projects, count(found.files), megabytes(found.bytes)],
      ['training', train.projects, count(train.files), megabytes(train.bytes)],
      ['validation', validation.projects, count(validation.files), megabytes(validation.bytes)],
    ],
  );
}

function trainingTable({ validation_loss: rows, steps, tokens, tokens_per_s: speed, parameters }) {
  const perStep = tokens / steps;
  return [
    `${count(parameters)} parameters, ${count(steps)} steps of ${count(perStep)} tokens, ${count(speed)} tokens/s (median).`,
    '',
    table(
      ['step', 'tokens', 'validation loss'],
      thinned(rows, 8).map(([step, loss]) => [count(step), `${((step * perStep) / 1e6).toFixed(0)}M`, loss.toFixed(3)]),
    ),
  ].join('\n');
}

/** Validation loss after 200 steps with dense attention, and `sparseSteps` with NSA, of the seeds that have both. */
function seedTable(runs, sparseSteps) {
  const lossOf = (attention, steps, of) =>
    runs.find((run) => run.attention === attention && run.seed === of && run.steps === steps)?.val_loss.at(-1)[1];
  const all = [1, 2, 3]
    .map((seed) => ({ seed, nsa: lossOf('nsa', sparseSteps, seed), dense: lossOf('dense', 200, seed) }))
    .filter(({ nsa, dense }) => nsa !== undefined && dense !== undefined);
  const rows = all.map(({ seed, nsa, dense }) => [seed, ...[nsa, dense, nsa - dense].map((value) => value.toFixed(3))]);
  if (all.length > 1) {
    const spread = (values) => `${mean(values).toFixed(3)} ± ${deviation(values).toFixed(3)}`;
    const column = (value) => spread(all.map(value));
    rows.push([
      'mean ± deviation',
      ...[column(({ nsa }) => nsa), column(({ dense }) => dense), column(({ nsa, dense }) => nsa - dense)],
    ]);
  }
  return table(['seed', `NSA, ${sparseSteps} steps`, 'dense, 200 steps', 'difference'], rows);
}

function positionTable({ branches: [positions], settings }) {
  const trained = Number(settings.train.seq_len);
  return table(
    ['tokens of context', 'targets', 'loss'],
    positions.by_position
      .filter(({ to }) => to >= FIRST_POSITION)
      .map(({ from, to, targets, loss }) => [
        `${count(from)} to ${count(to)}${from > trained ? ' (longer than trained)' : ''}`,
        ...[count(targets), loss.toFixed(3)],
      ]),
  );
}

function branchTable({ branches }) {
  const [all] = branches;
  return table(
    ['', 'loss', 'bits per byte', 'more loss'],
    branches.map(({ without, loss, bits_per_byte: bits }) => [
      without === undefined ? 'all branches' : `without ${BRANCH_NAMES[without]}`,
      ...[loss.toFixed(3), bits.toFixed(3), without === undefined ? '' : (loss - all.loss).toFixed(3)],
    ]),
  );
}

function gateTable({ attention }) {
  const last = attention.at(-1);
  return table(
    ['layer', 'compressed', 'selected', 'window', 'entropy', 'shared with the previous token'],
    last.cmp.map((_, layer) => [
      layer + 1,
      ...['cmp', 'sel', 'win'].map((branch) => last[branch][layer].toFixed(2)),
      ...[last.entropy[layer].toFixed(2), percent(last.neighbours[layer])],
    ]),
  );
}

function lengthsOf({ rows }) {
  return [...new Set(rows.map(({ length }) => length))].sort((a, b) => a - b);
}

/** All depths of a task at a length together. */
function allDepths({ rows }, task, length, without) {
  const these = rows.filter((row) => row.task === task && row.length === length && row.without === without);
  const cases = these.reduce((sum, row) => sum + row.cases, 0);
  const share = (value) => these.reduce((sum, row) => sum + value(row), 0) / cases;
  return {
    cases,
    accuracy: share(({ correct }) => correct),
    selected: share((row) => row.selected * row.cases),
    worst: Math.min(...these.map(({ accuracy }) => accuracy)),
  };
}

function retrievalTable({ retrieval }) {
  return table(
    ['task', 'tokens', 'cases', 'found', 'worst depth', 'block selected', 'without the selected branch'],
    TASKS.flatMap((task) =>
      lengthsOf(retrieval).map((length) => {
        const all = allDepths(retrieval, task, length, null);
        const without = allDepths(retrieval, task, length, 'sel');
        return [
          ...[task, count(length), count(all.cases), percent(all.accuracy), percent(all.worst), percent(all.selected)],
          percent(without.accuracy),
        ];
      }),
    ),
  );
}

/** The recipe of the long run and those after it beside the present one. */
function earlierTable({ retrieval: first }, { second, third }, { retrieval }) {
  return table(
    ['task', 'recipe', ...lengthsOf(retrieval).map((length) => `${count(length)} tokens`)],
    TASKS.flatMap((task) =>
      [
        ['first', first],
        ['second', second],
        ['third', third],
        ['present', retrieval],
      ].map(([name, result]) => [
        ...[task, name],
        ...lengthsOf(retrieval).map((length) => percent(allDepths(result, task, length, null).accuracy)),
      ]),
    ),
  );
}

/** The last check of every stage of the fine-tune. */
function stageTable({ retrieval }) {
  const { curve } = retrieval;
  const lasts = curve.filter(({ length }, i) => curve[i + 1]?.length !== length);
  return table(
    ['tokens', 'last step', 'seconds', 'loss', 'found', 'by search alone', 'block selected in the best layer'],
    lasts.map(({ step, seconds, length, loss, found, searched, selected }) => [
      ...[count(length), count(step), seconds === undefined ? '' : count(seconds), loss.toFixed(2), percent(found)],
      ...[typeof searched === 'number' ? percent(searched) : '', `${Math.max(...selected)} %`],
    ]),
  );
}

function faultTable({ faults }) {
  if (!faults) return 'Not measured yet.';
  return table(
    ['seconds', 'step', 'what happened'],
    faults.events.map(({ seconds, step, what }) => [seconds.toFixed(1), step, what]),
  );
}
