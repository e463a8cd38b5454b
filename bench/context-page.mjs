// Writes the tables of docs/explain/context.md and its chart from bench/results/context.json.
//
//   node bench/context-page.mjs [--check]
//
// --check only says whether they are current. Needs `npm run build`.
import { readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { lineChart } from '../dist/dashboard/report/svg.js';
import { mean, table, withFigures, writeOrCheck } from './markdown.mjs';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const PAGE = join(root, 'docs', 'explain', 'context.md');
const CHART = join(root, 'docs', 'images', 'context-needles.svg');
const LANGUAGE_CHART = join(root, 'docs', 'images', 'context-language.svg');
const SMALL_CHART = join(root, 'docs', 'images', 'context-small-language.svg');
const { runs } = JSON.parse(readFileSync(join(root, 'bench', 'results', 'context.json'), 'utf8'));

const LANGUAGE_NAMES = {
  'code-dense': 'dense attention',
  'code-nsa': 'sparse',
  'code-scorer': 'sparse with the loss',
  'code-scorer-window': 'and positions in the window alone',
};
const SMALL_NAMES = { 'small-code-dense': 'dense attention', 'small-code-window': 'sparse, the whole recipe' };

const order = [...new Set(runs.map(({ variant }) => variant))];
const sorted = runs.sort((a, b) => order.indexOf(a.variant) - order.indexOf(b.variant) || a.seed - b.seed);
const language = sorted.filter(({ variant, validation }) => variant.startsWith('code-') && validation);
const small = sorted.filter(({ variant, validation }) => variant.startsWith('small-code-') && validation);
const needles = sorted.filter(({ lengths }) => lengths);
const parts = {
  needles: needleRows(needles),
  seeds: seedTable(needles),
  choice: choiceRows(needles),
  language: languageRows(language),
  small: languageRows(small),
  stories: storyRows(sorted.filter(({ config, validation }) => config === 'quickstart' && validation)),
};
writeOrCheck(
  [
    [PAGE, withFigures(PAGE, parts)],
    [CHART, `${chart()}\n`],
    [LANGUAGE_CHART, `${languageChart(language, LANGUAGE_NAMES)}\n`],
    [SMALL_CHART, `${languageChart(small, SMALL_NAMES)}\n`],
  ],
  process.argv.includes('--check'),
);

function percents(shares) {
  return shares.map((share) => (100 * share).toFixed(1)).join(' / ');
}

/** Parts of the attention beyond the forced blocks: of the choice, and of a random one. */
function possible({ forced, random, chosen, best }) {
  return percents([chosen, random].map((share) => (share - forced) / (best - forced)));
}

function needleRows(rows) {
  const titles = [
    'variant',
    'seed',
    'found at 256 / 1,024 / 4,096, %',
    'worst depth, %',
    '95 % at step',
    'CPU s',
    'build',
  ];
  return table(
    titles,
    rows.map(({ variant, seed, summary, cpu_seconds: cpu, build }) => [
      ...[variant, seed, summary.found, summary.worst, summary.steps_to_95 ?? 'never', Math.round(cpu), build ?? ''],
    ]),
  );
}

function choiceRows(rows) {
  const titles = ['variant', 'seed', 'block selected, %', 'gates, nats', 'collapsed, %', 'of possible / random, %'];
  return table(
    titles,
    rows.map(({ variant, seed, lengths, gates, coverage }) => [
      ...[variant, seed, percents(lengths.map((row) => row.block_selected))],
      ...[gates.entropy.map((nats) => nats.toFixed(2)).join(', '), gates.collapse.map((x) => percents([x])).join(', ')],
      coverage.map(possible).join(', '),
    ]),
  );
}

/** Means and ranges of the variants with at least three seeds. */
function seedTable(rows) {
  const variants = [...new Set(rows.map(({ variant }) => variant))].map((name) => [name, seedsOf(rows, name)]);
  const cell = (values) =>
    Math.min(...values) === Math.max(...values)
      ? percents([values[0]])
      : `${percents([mean(values)])} (${percents([Math.min(...values)])} to ${percents([Math.max(...values)])})`;
  return table(
    ['variant', 'seeds', '256 tokens, %', '1,024, %', '4,096, %', 'worst depth of all, %'],
    variants
      .filter(([, seeds]) => seeds.length >= 3)
      .map(([variant, seeds]) => [
        ...[variant, seeds.length],
        ...[0, 1, 2].map((i) => cell(seeds.map(({ lengths }) => lengths[i].found))),
        percents([Math.min(...seeds.flatMap(({ lengths }) => lengths.map((row) => row.worst_depth)))]),
      ]),
  );
}

function seedsOf(rows, name) {
  return rows.filter(({ variant }) => variant === name);
}

function languageRows(rows) {
  return table(
    [
      ...['variant', 'seed', 'validation loss', 'gain from far context, nats', 'gates, nats', 'collapsed, %'],
      'of possible / random, %',
    ],
    rows.map(({ variant, seed, validation: { loss, far }, gates, coverage }) => [
      ...[variant, seed, loss.toFixed(3), `${far.gain.toFixed(4)} ± ${far.error.toFixed(4)}`],
      (gates.entropy ?? []).map((nats) => nats.toFixed(2)).join(', '),
      (gates.collapse ?? []).map((share) => percents([share])).join(', '),
      gates.entropy ? coverage.map(possible).join(', ') : '',
    ]),
  );
}

function storyRows(rows) {
  const titles = [
    ...['variant', 'seed', 'recalled, %', 'beyond 128 tokens, %', 'loss', 'gain from far context, nats'],
    ...['gates, nats', 'CPU s'],
  ];
  return table(
    titles,
    rows.map(({ variant, seed, summary, validation: { loss, far }, gates, cpu_seconds: cpu }) => [
      ...[variant, seed, summary.recall ?? '', summary.far ?? '', loss.toFixed(3)],
      `${far.gain.toFixed(4)} ± ${far.error.toFixed(4)}`,
      ...[(gates.entropy ?? []).map((nats) => nats.toFixed(2)).join(', '), Math.round(cpu)],
    ]),
  );
}

function chart() {
  const names = {
    nsa: 'AdamW, 1,500 steps',
    'short-nsa-muon': 'Muon, 750 steps',
    scorer: 'AdamW with the loss, 1,500 steps',
    'short-scorer-muon': 'Muon with the loss, 750 steps',
  };
  return lineChart({
    title: 'Needles found, mean and range of the seeds',
    ...{ x: 'tokens', y: '%', hasPowersOfTwo: true },
    series: Object.entries(names).map(([variant, name]) => {
      const seeds = seedsOf(needles, variant);
      const at = seeds[0].lengths.map(({ length }, i) => [
        Math.log2(length),
        seeds.map(({ lengths }) => 100 * lengths[i].found),
      ]);
      return {
        name: `${name} (${seeds.length})`,
        points: at.map(([x, found]) => [x, mean(found)]),
        band: at.map(([x, found]) => [x, Math.min(...found), Math.max(...found)]),
      };
    }),
  });
}

function languageChart(rows, names) {
  return lineChart({
    title: 'What context beyond 64 tokens is worth, by the length of the context',
    ...{ x: 'tokens', y: 'nats', hasPowersOfTwo: true },
    series: Object.entries(names).map(([variant, name]) => {
      const seeds = seedsOf(rows, variant).map(({ validation }) => validation.far.by_position);
      const at = seeds[0].map(({ to }, i) => [Math.log2(to), seeds.map((rows) => rows[i].gain)]);
      return {
        name: `${name} (${seeds.length})`,
        points: at.map(([x, gains]) => [x, mean(gains)]),
        band: at.map(([x, gains]) => [x, Math.min(...gains), Math.max(...gains)]),
      };
    }),
  });
}
