/** `trefoil eval selection`: what a model looks at while it reads a text, as numbers and as pictures. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { type Command, Option } from 'commander';
import { UsageError } from '../../errors.js';
import { ensureFolder } from '../../folders.js';
import { withEnvironment } from '../../infer/environment.js';
import { loadModel } from '../../infer/load-model.js';
import { inspectSelection, type LayerSelection } from '../../infer/selection.js';
import { kernelOptions } from '../../model/kernels.js';
import { fileError, writeFileAtomic } from '../../run/atomic.js';
import { lineChart } from '../../watch/report/svg.js';
import { type DeviceChoice, deviceOption, openDevice } from '../shared/device.js';
import { type Io, printJson, runBlocking } from '../shared/io.js';
import { jsonOption, threadsOption, wholeNumber } from '../shared/options.js';
import { formatTable } from '../shared/table.js';

interface Options {
  readonly model: string;
  readonly textFile: string;
  readonly maxTokens: number;
  readonly outDir?: string;
  readonly device: DeviceChoice;
  readonly threads?: number;
  readonly json?: boolean;
}

export function configure(command: Command, io: Io): void {
  command
    .requiredOption('--model <path>', 'run folder, checkpoint folder, or model.safetensors with its config.json')
    .requiredOption('--text-file <file>', 'the text to read')
    .addOption(
      new Option('--max-tokens <n>', 'read no more than its first tokens').argParser(wholeNumber(1)).default(8192),
    )
    .option('--out-dir <folder>', 'write selection.json, selection.svg and gates.svg there')
    .addOption(deviceOption('where to compute'))
    .addOption(threadsOption())
    .addOption(jsonOption())
    .action((options: Options) => runBlocking(() => run(options, io)));
}

function run(options: Options, io: Io): void {
  const text = readText(options.textFile);
  const { model, tokenizer, config, path, step, warnings } = loadModel(openDevice(options), options.model, 'f32');
  try {
    for (const warning of warnings) io.warn(warning);
    const tokens = Array.from(tokenizer.encode(text)).slice(0, options.maxTokens);
    if (tokens.length === 0) throw new UsageError(`${options.textFile}: holds no text`);
    const unknown = tokens.find((token) => token >= model.shape.vocabSize);
    if (unknown !== undefined)
      throw new UsageError(`${options.textFile}: holds token ${unknown}, but the model has ${model.shape.vocabSize}`);
    const layers = inspectSelection(model, tokens, kernelOptions(withEnvironment(config, io.env)));
    const result = { model: path, step, tokens: tokens.length, l_sel: model.shape.nsa.lSel, layers };
    if (options.outDir !== undefined) writePictures(options.outDir, result);
    if (options.json) printJson(io, result);
    else io.out(table(layers));
  } finally {
    model.free();
  }
}

function readText(path: string): string {
  try {
    return readFileSync(path, 'utf8');
  } catch (error) {
    throw fileError('read', path, error);
  }
}

function writePictures(folder: string, result: { readonly layers: readonly LayerSelection[] }): void {
  ensureFolder(folder);
  const { layers } = result;
  const selection = lineChart({
    ...{ title: 'Selected blocks by distance', x: 'blocks back', y: 'share that selected it', fromZero: true },
    series: layers.map(({ layer, rate_by_distance }) => ({
      name: `layer ${layer}`,
      points: rate_by_distance.map((rate, distance) => [distance, rate] as const),
    })),
  });
  const gates = lineChart({
    ...{ title: 'Share of each branch', x: 'layer', y: 'share', fromZero: true },
    series: (['cmp', 'sel', 'win'] as const).map((name) => ({
      name,
      points: layers.map((layer) => [layer.layer, layer.gates[name]] as const),
    })),
  });
  writeFileAtomic(join(folder, 'selection.json'), `${JSON.stringify(result)}\n`);
  writeFileAtomic(join(folder, 'selection.svg'), selection);
  writeFileAtomic(join(folder, 'gates.svg'), gates);
}

function table(layers: readonly LayerSelection[]): string {
  const percent = (value: number) => `${(100 * value).toFixed(1)} %`;
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
