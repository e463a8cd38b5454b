/** `trefoil eval loss`: measures the loss of a model on a data source. */
import { existsSync } from 'node:fs';
import { dirname } from 'node:path';
import { DATA_SOURCES } from '../../config/data-sources.js';
import { FlagSettings } from '../../config/flags.js';
import { loadConfig, readSavedConfig } from '../../config/load.js';
import { parseConfig } from '../../config/parse.js';
import type { Config } from '../../config/schema.js';
import { lineChart } from '../../dashboard/report/svg.js';
import { UsageError } from '../../errors.js';
import { switchOffBranch } from '../../evaluate/without-branch.js';
import { writeFileAtomic } from '../../files.js';
import { withEnvironment } from '../../infer/environment.js';
import { type LoadedModel, loadModel } from '../../infer/load.js';
import { BRANCHES, type Branch } from '../../ops/attention/gate/op.js';
import { runPaths } from '../../run/paths.js';
import { evaluateSource, type PositionLoss } from '../../train/evaluate.js';
import type { SourceLoss } from '../../train/evaluation.js';
import type { FarContext } from '../../train/far-context.js';
import { deviceOption, openDevice } from '../shared/device.js';
import { type Io, ProgressLine, printJson } from '../shared/io.js';
import {
  adapterOption,
  configured,
  csvOption,
  Flag,
  flag,
  jsonOption,
  modelFlag,
  modelOption,
  type OptionValues,
  parsed,
  repeated,
  threadsOption,
  weightsOption,
  wholeNumber,
} from '../shared/options.js';
import { formatCsv, formatTable, right } from '../shared/table.js';

const OPTIONS = {
  model: modelOption(),
  adapter: adapterOption(),
  dataset: flag('--dataset <source>', `data.source: one of ${DATA_SOURCES.join(', ')} (default: implied by the path)`),
  localPath: flag('--local-path <path>', 'data.path: file, folder or pattern of a local source'),
  seqLen: parsed('--seq-len <n>', 'tokens of a sample', wholeNumber(1), 1024),
  batchSize: parsed('--batch-size <n>', 'samples of a batch', wholeNumber(1), 1),
  batches: parsed('--batches <n>', 'at most this many batches', wholeNumber(1), 64),
  set: repeated('--set <key=value>', 'set any key of data; may be repeated'),
  device: deviceOption('where to compute'),
  weights: weightsOption(),
  threads: threadsOption(),
  byPosition: flag('--by-position', 'also the loss by the length of the context, and what far context is worth'),
  near: parsed(
    '--near <n>',
    'with --by-position: tokens of context that are not far (default: nsa.w of the first model, or 512)',
    wholeNumber(1),
  ),
  compare: modelFlag('--compare <path...>', 'further models to evaluate on the same data'),
  without: new Flag<Branch[] | undefined>(
    '--without <branch...>',
    'also with this branch of attention switched off',
  ).choices(BRANCHES),
  svg: flag('--svg <file>', 'with --by-position: write a chart'),
  csv: csvOption(),
  json: jsonOption(
    '{model, step, source, loss, perplexity, targets, batches, bits_per_byte, complete, by_source: [{name, loss, targets}], by_position: [{from, to, targets, loss}], far: {near, targets, loss, near_loss, gain, error, by_position: [{from, to, targets, gain}]}}, or {models: [{…, without}]} with --compare or --without',
  ),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
The tokenizer is the model's. The source is read from its start, each target
once, the last short sample included. --set data.val_fraction=0.01 reads only
the part that a training run with this fraction sets aside.
bpb: bits of loss per byte of UTF-8 text, comparable between tokenizers.
--by-position groups targets by the tokens of context they are predicted from:
1, 2, 3-4, 5-8 and so on. A model that uses its context has a falling loss.
Its last line is the gain from far context: the loss of targets when their
context is cut to its last --near tokens (up to a quarter more) less their loss
with all of it, with the standard error over samples. 0: nothing is read there.
--compare shows the models side by side, by the part of their path in which they
differ. Models of one setup with several seeds are one column and one curve:
their mean, and the range of the seeds.
--without cmp sel win shows what each branch contributes: its gate is set to 0
in every layer; a softmax gate gives its weight to the other two.
`;

export const configure = configured(OPTIONS, run, HELP);

/** The result for one model, as `--json` prints it. */
interface LossRow {
  readonly model: string;
  /** The branch that was switched off. */
  readonly without?: Branch;
  readonly step: number;
  readonly source: string;
  readonly loss: number;
  readonly perplexity: number;
  readonly targets: number;
  readonly batches: number;
  readonly bits_per_byte: number | null;
  readonly complete: boolean;
  readonly by_source?: readonly SourceLoss[];
  readonly by_position?: readonly PositionLoss[];
  /** Null if no sample is longer than `near`. */
  readonly far?: FarContext | null;
}

/** A measured model, and what tells it from others: models of one setup differ by their seeds. */
interface MeasuredModel extends LossRow {
  readonly setup: string;
  readonly seed: number;
}

async function run(options: Options, io: Io): Promise<void> {
  const { byPosition = false, compare = [], without = [] } = options;
  for (const [name, value] of Object.entries({ '--csv': options.csv, '--svg': options.svg, '--near': options.near }))
    if (value !== undefined && !byPosition)
      throw new UsageError(`${name}: shows the loss by position; add --by-position`);
  let near = options.near;
  const rows: MeasuredModel[] = [];
  // All models read the same data: what is said about it is said once.
  const said = new Set<string>();
  const say = (line: string) => {
    if (!said.has(line)) io.err(line);
    said.add(line);
  };
  let tokenizer: string | undefined;
  for (const [i, path] of [options.model, ...compare].entries()) {
    const { weights, adapter } = options;
    const loaded = loadModel(openDevice(options), path, 'f32', { weights, adapter: i === 0 ? adapter : undefined });
    try {
      tokenizer ??= loaded.tokenizer.identity;
      if (loaded.tokenizer.identity !== tokenizer)
        throw new UsageError(
          `--compare: ${path} has another tokenizer than ${options.model}; their losses are not comparable`,
        );
      const { attention, nsa } = loaded.model.shape;
      near ??= attention === 'nsa' ? nsa.w : 512;
      rows.push(await measure(loaded, { ...options, near }, io, say));
      for (const branch of without) {
        const switchOn = switchOffBranch(loaded.model, branch);
        rows.push({ ...(await measure(loaded, { ...options, near }, io, say)), without: branch });
        switchOn();
      }
    } finally {
      loaded.free();
    }
  }
  const curves = curvesOf(rows);
  if (options.svg !== undefined) writeFileAtomic(options.svg, chart(curves));
  const plain = rows.map(({ setup: _, seed: __, ...row }) => row);
  if (options.json) printJson(io, plain.length === 1 ? plain[0] : { models: plain });
  else if (options.csv) io.out(csv(rows));
  else {
    const names = namesOf(rows);
    const named = (i: number) => (rows.length === 1 ? '' : `${names[i]}: `);
    for (const [i, row] of rows.entries()) {
      io.out(`${named(i)}${summary(row)}`);
      for (const part of row.by_source ?? [])
        io.out(`  ${part.name}: loss ${part.loss.toFixed(4)}, ${part.targets} targets`);
    }
    if (byPosition) {
      io.out(table(curves, io.width));
      for (const [i, row] of rows.entries()) if (row.far) io.out(`${named(i)}${farLine(row.far)}`);
      if (rows[0].far === null) io.out(`far context: no sample is longer than --near ${near}`);
    }
  }
}

async function measure(
  loaded: LoadedModel,
  options: Options,
  io: Io,
  say: (line: string) => void,
): Promise<MeasuredModel> {
  const { model, path, step, warnings } = loaded;
  for (const warning of warnings) io.warn(warning);
  const config = evaluationConfig(loaded, options, io);
  const progress = new ProgressLine(io);
  const { loss, perplexity, targets, batches, bitsPerByte, complete, byPosition, far, bySource } = await evaluateSource(
    model,
    config,
    options.batches,
    {
      say,
      warn: io.warn,
      environment: io.env,
      terminal: io.stderr,
      ...(options.byPosition && { near: options.near }),
      onBatch: (done, all) => progress.show(`${done} of ${all} batches`),
    },
  );
  progress.clear();
  return {
    ...setupOf(loaded),
    model: path,
    step,
    source: config.data.source,
    loss,
    perplexity,
    targets,
    batches,
    bits_per_byte: bitsPerByte,
    complete,
    ...(bySource && { by_source: bySource }),
    ...(options.byPosition && { by_position: byPosition, far }),
  };
}

/** A final model says neither its seed nor its training: these are in the config of its run. */
function setupOf({ path, config }: LoadedModel): Pick<MeasuredModel, 'setup' | 'seed'> {
  const { config: file } = runPaths(dirname(path));
  const { model, nsa, data, train } = existsSync(file) ? readSavedConfig(file) : config;
  const { seed, out_dir: _, ...others } = train;
  return { setup: JSON.stringify([model, nsa, data, others]), seed };
}

function nameOf({ model, without }: LossRow): string {
  return without === undefined ? model : `${model} without ${without}`;
}

function summary({ loss, perplexity, bits_per_byte: bitsPerByte, targets, batches, complete, step }: LossRow): string {
  return (
    `loss ${loss.toFixed(4)} | ppl ${perplexity.toFixed(2)} | ` +
    `${bitsPerByte === null ? '' : `bpb ${bitsPerByte.toFixed(4)} | `}${targets} targets in ${batches} batches` +
    `${complete ? '' : ' (more with --batches)'}, step ${step}`
  );
}

/** Names of models without the folders that all of them share, and with a number where two are the same. */
function namesOf(rows: readonly LossRow[]): string[] {
  const parts = rows.map(({ model }) => model.replace(/\/model\.safetensors$/, '').split('/'));
  const shortest = Math.min(...parts.map(({ length }) => length));
  let shared = 0;
  while (shared < shortest - 1 && parts.every((one) => one[shared] === parts[0][shared])) shared += 1;
  const names = rows.map(({ without }, i) => {
    const name = parts[i].slice(shared).join('/');
    return without === undefined ? name : `${name} without ${without}`;
  });
  return names.map((name, i) => {
    const before = names.slice(0, i).filter((other) => other === name).length;
    return before === 0 ? name : `${name} (${before + 1})`;
  });
}

/** The losses by position of a model, or of the models of one setup with several seeds. */
interface LossCurve {
  readonly name: string;
  readonly points: readonly (PositionLoss & { readonly low: number; readonly high: number })[];
  readonly seeds: number;
}

function curvesOf(rows: readonly MeasuredModel[]): LossCurve[] {
  const names = namesOf(rows);
  const groups: number[][] = [];
  rows.forEach((row, i) => {
    const isSeedOf = ([first, ...others]: number[]) =>
      rows[first].setup === row.setup &&
      rows[first].without === row.without &&
      [first, ...others].every((other) => rows[other].seed !== row.seed);
    const group = groups.find(isSeedOf);
    if (group) group.push(i);
    else groups.push([i]);
  });
  return groups.map((group) => ({
    name: group.length === 1 ? names[group[0]] : `${names[group[0]]} (${group.length} seeds)`,
    seeds: group.length,
    points: (rows[group[0]].by_position ?? []).map((position, at) => {
      const losses = group.map((i) => rows[i].by_position![at].loss);
      const mean = losses.reduce((sum, loss) => sum + loss, 0) / losses.length;
      return { ...position, loss: mean, low: Math.min(...losses), high: Math.max(...losses) };
    }),
  }));
}

/** The same positions for every model: they read the same data. Columns after the first model show the difference to it. */
function table(curves: readonly LossCurve[], width: number): string {
  const [first, ...others] = curves;
  const cell = ({ points, seeds }: LossCurve, i: number) => {
    const { loss, low, high } = points[i];
    return seeds === 1 ? loss.toFixed(4) : `${loss.toFixed(4)} ± ${((high - low) / 2).toFixed(4)}`;
  };
  const titles = others.flatMap(({ name }) => [name, 'difference']);
  const text = formatTable(
    right('context', 'targets', curves.length === 1 && first.seeds === 1 ? 'loss' : first.name, ...titles),
    first.points.map(({ from, to, targets, loss }, i) => [
      ...[from === to ? String(to) : `${from}-${to}`, String(targets), cell(first, i)],
      ...others.flatMap((other) => [cell(other, i), signed(other.points[i].loss - loss)]),
    ]),
    width,
  ).trimEnd();
  const note = curves.some(({ seeds }) => seeds > 1) ? '\n± half the range of the seeds around their mean' : '';
  return text + note;
}

function farLine({ near, targets, gain, error, loss, near_loss: cut }: FarContext): string {
  const spread = error === null ? '' : ` ± ${error.toFixed(4)}`;
  return (
    `far context (more than ${near} tokens) is worth ${gain.toFixed(4)}${spread} nats: ` +
    `${cut.toFixed(4)} without, ${loss.toFixed(4)} with it, ${targets} targets`
  );
}

function signed(value: number): string {
  return `${value < 0 ? '' : '+'}${value.toFixed(4)}`;
}

function csv(rows: readonly LossRow[]): string {
  return formatCsv(
    ['model', 'from', 'to', 'targets', 'loss'],
    rows.flatMap((row) => (row.by_position ?? []).map((position) => ({ model: nameOf(row), ...position }))),
  );
}

function chart(curves: readonly LossCurve[]): string {
  const place = ({ to }: PositionLoss) => Math.log2(to);
  return lineChart({
    title: 'Loss by position',
    x: 'tokens of context',
    y: 'loss',
    hasPowersOfTwo: true,
    series: curves.map(({ name, points, seeds }) => ({
      name,
      points: points.map((point) => [place(point), point.loss] as const),
      ...(seeds > 1 && { band: points.map((point) => [place(point), point.low, point.high] as const) }),
    })),
  });
}

/** The model's own config with the data that the flags name. */
function evaluationConfig(
  { model, config }: LoadedModel,
  { dataset, localPath, seqLen, batchSize, set = [] }: Options,
  io: Io,
): Config {
  const isNamed = set.some((text) => /^data\.(path|source)=/.test(text));
  if (dataset === undefined && localPath === undefined && !isNamed)
    throw new UsageError('no data; name a source with --dataset or a path with --local-path');
  const flags = new FlagSettings().add('seq-len', String(seqLen)).add('batch-size', String(batchSize));
  if (dataset !== undefined) flags.add('dataset', dataset);
  if (localPath !== undefined) flags.add('local-path', localPath);
  const { layer } = flags.set('data.val_fraction=0', 'data.shuffle=false', ...set);
  const asked = loadConfig({ env: io.env, flags: layer, config: null }).config;
  const { tokenizer } = config.data;
  const { source } = asked.data;
  const vocabulary =
    source === 'synthetic' || source === 'needle' ? { vocab_size: model.shape.vocabSize } : { vocab_size: null };
  return parseConfig({
    ...withEnvironment(config, io.env),
    data: { ...asked.data, tokenizer, ...vocabulary },
    train: {
      ...config.train,
      seq_len: asked.train.seq_len,
      batch_size: asked.train.batch_size,
      seed: asked.train.seed,
    },
  });
}
