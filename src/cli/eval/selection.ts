/** `trefoil eval selection`: which blocks a model selects while it reads a text, as numbers, charts and a map. */
import { existsSync } from 'node:fs';
import { basename, dirname, join } from 'node:path';
import { densityMap } from '../../dashboard/report/heat-map.js';
import { lineChart } from '../../dashboard/report/svg.js';
import { UsageError } from '../../errors.js';
import {
  inspectCoverage,
  inspectSelection,
  type LayerSelection,
  type ModelCoverage,
} from '../../evaluate/selection.js';
import { traceText } from '../../evaluate/trace.js';
import { writeTrace } from '../../evaluate/write-trace.js';
import { ensureFolder, readGivenText, writeFileAtomic } from '../../files.js';
import { withEnvironment } from '../../infer/environment.js';
import { loadModel } from '../../infer/load.js';
import { kernelOptions } from '../../model/kernels.js';
import { meanCoverage } from '../../ops/attention/coverage.js';
import { runPaths } from '../../run/paths.js';
import { runBlocking } from '../shared/blocking.js';
import { deviceOption, openDevice } from '../shared/device.js';
import { type Io, printJson } from '../shared/io.js';
import {
  adapterOption,
  configured,
  Flag,
  flag,
  jsonOption,
  modelOption,
  type OptionValues,
  parsed,
  required,
  threadsOption,
  weightsOption,
  wholeNumber,
} from '../shared/options.js';
import { formatTable, right } from '../shared/table.js';

const OPTIONS = {
  model: modelOption(),
  adapter: adapterOption(),
  textFile: required('--text-file <file>', 'text for the model to read'),
  maxTokens: parsed('--max-tokens <n>', 'read at most this many tokens of it', wholeNumber(1), 8192),
  coverage: flag(
    '--coverage',
    'how much of its own attention the choice covers, beside the best choice and a random one',
  ),
  samples: parsed('--samples <n>', 'with --coverage: tokens to measure it at', wholeNumber(1), 64),
  outDir: flag(
    '--out-dir <folder>',
    'write selection.json, selection.svg, selection-map.svg and gates.svg, and with --coverage coverage.svg',
  ),
  trace: new Flag<string | true | undefined>(
    '--trace [file]',
    'save what every token read, for the dashboard (default: traces/TEXT.safetensors in the run)',
  ),
  layer: parsed(
    '--layer <n>',
    'layer of the printed map (default: the one with the largest sel share)',
    wholeNumber(0),
  ),
  device: deviceOption('where to compute'),
  weights: weightsOption(),
  threads: threadsOption(),
  json: jsonOption(
    '{model, step, tokens, l_sel, layers: [{layer, rate_by_distance, gates: {cmp, sel, win}, gates_by_block, selection_map: {tokens_per_row, share}}], coverage: {tokens, n_sel, l_sel, layers: [{layer, forced, random, chosen, best, groups, by_distance}]}}; coverage with --coverage, layers is empty for dense attention',
  ),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
--coverage needs no labels: at sampled tokens the softmax of the selected
branch's own queries and keys over all earlier tokens says where the attention
would go. Shares of it that were read, by layer: forced blocks alone, a random
choice of as many blocks (expected), the choice that was made, and the best one.
"of possible" is (chosen - forced) / (best - forced). Dense attention chooses
nothing: best says what nsa.n_sel blocks of nsa.l_sel tokens could hold.
`;

export const configure = configured(OPTIONS, run, HELP);

function run(options: Options, io: Io): void {
  const text = readGivenText(options.textFile);
  const { model, tokenizer, config, path, step, warnings } = runBlocking(() =>
    loadModel(openDevice(options), options.model, 'f32', options),
  );
  try {
    for (const warning of warnings) io.warn(warning);
    const tokens = Array.from(tokenizer.encode(text)).slice(0, options.maxTokens);
    if (tokens.length === 0) throw new UsageError(`${options.textFile}: contains no text`);
    const unknown = tokens.find((token) => token >= model.shape.vocabSize);
    if (unknown !== undefined)
      throw new UsageError(
        `${options.textFile}: contains token ${unknown}, but the vocabulary of the model has ${model.shape.vocabSize}`,
      );
    const kernels = kernelOptions(withEnvironment(config, io.env));
    const isDense = model.shape.attention === 'dense';
    const layers = isDense && options.coverage ? [] : runBlocking(() => inspectSelection(model, tokens, kernels));
    const coverage = options.coverage
      ? runBlocking(() => inspectCoverage(model, tokens, options.samples, kernels))
      : undefined;
    const result = { model: path, step, tokens: tokens.length, l_sel: model.shape.nsa.lSel, layers, coverage };
    if (options.outDir !== undefined) writePictures(options.outDir, result);
    if (options.trace !== undefined) {
      const file = options.trace === true ? defaultTrace(path, options.textFile) : options.trace;
      ensureFolder(dirname(file));
      const pieces = tokens.map((token) => tokenizer.decode([token]));
      writeTrace(file, model, traceText(model, tokens, kernels), { model: basename(path), step, pieces });
      io.err(`trace: ${file}`);
    }
    if (options.json) printJson(io, result);
    else if (coverage) io.out(coverageTable(coverage));
    else {
      io.out(table(layers));
      io.out(mapOf(chosenLayer(layers, options.layer), io.width));
    }
  } finally {
    model.free();
  }
}

/** Inside the run that the model belongs to, where the dashboard looks for traces. */
function defaultTrace(model: string, textFile: string): string {
  const folders = [model, dirname(model), dirname(dirname(model)), dirname(dirname(dirname(model)))];
  const run = folders.find(
    (folder) => existsSync(runPaths(folder).config) || existsSync(runPaths(folder).heartbeat(0)),
  );
  if (run === undefined) throw new UsageError(`--trace: ${model} is not in a run folder; name a file`);
  const name = basename(textFile).replace(/[^\w.-]/g, '_');
  return join(run, 'traces', `${name}.safetensors`);
}

interface Result {
  readonly tokens: number;
  readonly layers: readonly LayerSelection[];
  readonly coverage: ModelCoverage | undefined;
}

function writePictures(folder: string, result: Result): void {
  ensureFolder(folder);
  const { layers, coverage } = result;
  writeFileAtomic(join(folder, 'selection.json'), `${JSON.stringify(result)}\n`);
  if (coverage) writeFileAtomic(join(folder, 'coverage.svg'), coverageChart(coverage));
  if (layers.length === 0) return;
  const selection = lineChart({
    title: 'Selected blocks by distance',
    x: 'distance in blocks',
    y: 'share of tokens',
    fromZero: true,
    series: layers.map(({ layer, rate_by_distance }) => ({
      name: `layer ${layer}`,
      points: rate_by_distance.map((rate, distance) => [distance, rate] as const),
    })),
  });
  const gates = lineChart({
    title: 'Share of each branch',
    x: 'layer',
    y: 'share',
    fromZero: true,
    series: (['cmp', 'sel', 'win'] as const).map((name) => ({
      name,
      points: layers.map((layer) => [layer.layer, layer.gates[name]] as const),
    })),
  });
  const last = result.tokens - 1;
  const map = densityMap({
    title: 'Blocks selected, by token and block',
    x: 'block',
    y: 'token',
    ends: ['0', String(last)],
    tables: layers.map(({ layer, selection_map }) => ({ title: `layer ${layer}`, values: selection_map.share })),
  });
  writeFileAtomic(join(folder, 'selection.svg'), selection);
  writeFileAtomic(join(folder, 'selection-map.svg'), `${map}\n`);
  writeFileAtomic(join(folder, 'gates.svg'), gates);
}

/** The share of the attention at each distance that was read, mean of the layers. */
function coverageChart({ layers }: ModelCoverage): string {
  const names = ['chosen', 'best', 'random'] as const;
  const bins = layers[0].by_distance.map((_, bin) => layers.map(({ by_distance }) => by_distance[bin]));
  return lineChart({
    title: 'Attention covered by the selected blocks',
    x: 'log2 of the distance in blocks',
    y: 'share',
    fromZero: true,
    series: names.map((name) => ({
      name,
      points: bins.map((bin, i) => {
        const sum = (of: typeof name | 'all') => bin.reduce((total, one) => total + one[of], 0);
        return [i, sum(name) / sum('all')] as const;
      }),
    })),
  });
}

function coverageTable({ tokens, layers, n_sel, l_sel }: ModelCoverage): string {
  const share = (value: number) => (Number.isNaN(value) ? '-' : percent(value));
  const rows = [
    ...layers.map((one) => ({ name: String(one.layer), ...one })),
    { name: 'mean', ...meanCoverage(layers) },
  ];
  return [
    `Attention in ${n_sel} blocks of ${l_sel} tokens, at ${tokens} tokens that have more:`,
    formatTable(
      right('layer', 'forced', 'random', 'chosen', 'best', 'of possible'),
      rows.map(({ name, forced, random, chosen, best }) => [
        ...[name, share(forced), share(random), share(chosen), share(best)],
        share((chosen - forced) / (best - forced)),
      ]),
    ),
  ].join('\n');
}

function percent(value: number): string {
  return `${(100 * value).toFixed(1)} %`;
}

function chosenLayer(layers: readonly LayerSelection[], number: number | undefined): LayerSelection {
  const chosen =
    number === undefined
      ? layers.reduce((best, layer) => (layer.gates.sel > best.gates.sel ? layer : best))
      : layers[number];
  if (!chosen) throw new UsageError(`--layer ${number}: the model has layers 0 to ${layers.length - 1}`);
  return chosen;
}

const SHADES = [' ', '░', '▒', '▓', '█'];
const PRINTED_ROWS = 24;

/** The map in characters: tokens down, blocks to the right, cells averaged until it fits. */
function mapOf({ layer, selection_map: { tokens_per_row, share } }: LayerSelection, width: number): string {
  const blocks = share[0].length;
  const [down, across] = [Math.ceil(share.length / PRINTED_ROWS), Math.ceil(blocks / (width - 16))];
  const lines: string[] = [];
  for (let row = 0; row < share.length; row += down) {
    const rows = share.slice(row, row + down);
    let cells = '';
    for (let block = 0; block < blocks; block += across) {
      const values = rows.flatMap((one) => one.slice(block, block + across));
      const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
      cells += SHADES[mean > 0 ? Math.max(1, Math.round(mean * (SHADES.length - 1))) : 0];
    }
    lines.push(`${String(row * tokens_per_row).padStart(10)} │${cells}│`);
  }
  return [
    `Blocks selected in layer ${layer}, by token (rows) and block (columns 0 to ${blocks - 1});`,
    'the darker, the more of the tokens and groups selected the block:',
    ...lines,
  ].join('\n');
}

function table(layers: readonly LayerSelection[]): string {
  return formatTable(
    ['layer', 'cmp', 'sel', 'win', 'mean distance'].map((title) => ({ title, align: 'right' as const })),
    layers.map(({ layer, gates, rate_by_distance: rates }) => {
      const total = rates.reduce((sum, rate) => sum + rate, 0);
      const distance = rates.reduce((sum, rate, blocks) => sum + rate * blocks, 0) / total;
      return [
        String(layer),
        percent(gates.cmp),
        percent(gates.sel),
        percent(gates.win),
        `${distance.toFixed(1)} blocks`,
      ];
    }),
  );
}
