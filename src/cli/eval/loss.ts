/** `trefoil eval loss`: measures the loss of a model on a data source. */
import { DATA_SOURCES } from '../../config/data-sources.js';
import { parseTrainFlags } from '../../config/flags.js';
import { loadConfig } from '../../config/load.js';
import { parseConfig } from '../../config/parse.js';
import type { Config } from '../../config/schema.js';
import { lineChart } from '../../dashboard/report/svg.js';
import { UsageError } from '../../errors.js';
import { writeFileAtomic } from '../../files.js';
import { withEnvironment } from '../../infer/environment.js';
import { type LoadedModel, loadModel } from '../../infer/load-model.js';
import { switchOffBranch } from '../../infer/without-branch.js';
import { BRANCHES, type Branch } from '../../ops/attention/gate/op.js';
import { evaluateSource, type PositionLoss } from '../../train/evaluate.js';
import { deviceOption, openDevice } from '../shared/device.js';
import { type Io, printJson } from '../shared/io.js';
import {
  configured,
  csvOption,
  Flag,
  flag,
  jsonOption,
  modelOption,
  type OptionValues,
  parsed,
  repeated,
  threadsOption,
  wholeNumber,
} from '../shared/options.js';
import { formatCsv, formatTable, right } from '../shared/table.js';

const OPTIONS = {
  model: modelOption(),
  dataset: flag('--dataset <source>', `data.source: one of ${DATA_SOURCES.join(', ')} (default: implied by the path)`),
  localPath: flag('--local-path <path>', 'data.path: file, folder or pattern of a local source'),
  seqLen: parsed('--seq-len <n>', 'tokens of a sample', wholeNumber(1), 1024),
  batchSize: parsed('--batch-size <n>', 'samples of a batch', wholeNumber(1), 1),
  batches: parsed('--batches <n>', 'at most this many batches', wholeNumber(1), 64),
  set: repeated('--set <key=value>', 'set any key of data; may be repeated'),
  device: deviceOption('where to compute'),
  threads: threadsOption(),
  byPosition: flag('--by-position', 'also the loss by the length of the context, in powers of two'),
  compare: flag('--compare <path...>', 'further models to evaluate on the same data'),
  without: new Flag<Branch[] | undefined>(
    '--without <branch...>',
    'also with this branch of attention switched off',
  ).choices(BRANCHES),
  svg: flag('--svg <file>', 'with --by-position: write a chart'),
  csv: csvOption(),
  json: jsonOption(
    '{model, step, source, loss, perplexity, targets, batches, bits_per_byte, complete, by_position: [{from, to, targets, loss}]}, or {models: [{…, without}]} with --compare or --without',
  ),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
The tokenizer is the model's. The source is read from its start, each target
once, the last short sample included. --set data.val_fraction=0.01 reads only
the part that a training run with this fraction and seed sets aside.
bpb: bits of loss per byte of UTF-8 text, comparable between tokenizers.
--by-position groups targets by the tokens of context they are predicted from:
1, 2, 3-4, 5-8 and so on. A model that uses its context has a falling loss.
--without cmp sel win shows what each branch contributes: its gate is set to 0
in every layer; a softmax gate gives its weight to the other two.
`;

export const configure = configured(OPTIONS, run, HELP);

/** The result for one model, as `--json` prints it. */
interface Row {
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
  readonly by_position?: readonly PositionLoss[];
}

async function run(options: Options, io: Io): Promise<void> {
  const { byPosition = false, compare = [], without = [] } = options;
  for (const [name, value] of Object.entries({ '--csv': options.csv, '--svg': options.svg }))
    if (value !== undefined && !byPosition)
      throw new UsageError(`${name}: shows the loss by position; add --by-position`);
  const rows: Row[] = [];
  let tokenizer: string | undefined;
  for (const path of [options.model, ...compare]) {
    const loaded = loadModel(openDevice(options), path, 'f32');
    try {
      tokenizer ??= loaded.tokenizer.identity;
      if (loaded.tokenizer.identity !== tokenizer)
        throw new UsageError(
          `--compare: ${path} has another tokenizer than ${options.model}; their losses are not comparable`,
        );
      rows.push(await measure(loaded, options, io));
      for (const branch of without) {
        const switchOn = switchOffBranch(loaded.model, branch);
        rows.push({ ...(await measure(loaded, options, io)), without: branch });
        switchOn();
      }
    } finally {
      loaded.free();
    }
  }
  if (options.svg !== undefined) writeFileAtomic(options.svg, chart(rows));
  if (options.json) printJson(io, rows.length === 1 ? rows[0] : { models: rows });
  else if (options.csv) io.out(csv(rows));
  else {
    for (const row of rows) io.out(`${rows.length === 1 ? '' : `${nameOf(row)}: `}${summary(row)}`);
    if (byPosition) io.out(table(rows, io.width));
  }
}

async function measure(loaded: LoadedModel, options: Options, io: Io): Promise<Row> {
  const { model, path, step, warnings } = loaded;
  for (const warning of warnings) io.warn(warning);
  const config = evaluationConfig(loaded, options, io);
  const { loss, perplexity, targets, batches, bitsPerByte, complete, byPosition } = await evaluateSource(
    model,
    config,
    options.batches,
    {
      say: (line) => io.err(line),
      warn: io.warn,
      environment: io.env,
      terminal: io.stderr,
    },
  );
  return {
    model: path,
    step,
    source: config.data.source,
    loss,
    perplexity,
    targets,
    batches,
    bits_per_byte: bitsPerByte,
    complete,
    ...(options.byPosition && { by_position: byPosition }),
  };
}

function nameOf({ model, without }: Row): string {
  return without === undefined ? model : `${model} without ${without}`;
}

function summary({ loss, perplexity, bits_per_byte: bitsPerByte, targets, batches, complete, step }: Row): string {
  return (
    `loss ${loss.toFixed(4)} | ppl ${perplexity.toFixed(2)} | ` +
    `${bitsPerByte === null ? '' : `bpb ${bitsPerByte.toFixed(4)} | `}${targets} targets in ${batches} batches` +
    `${complete ? '' : ' (more with --batches)'}, step ${step}`
  );
}

/** The same positions for every model: they read the same data. Columns after the first model show the difference to it. */
function table(rows: readonly Row[], width: number): string {
  const [first, ...others] = rows.map(({ by_position: positions = [] }) => positions);
  const titles = others.flatMap((_, i) => [`loss ${i + 2}`, `- loss 1`]);
  return formatTable(
    right('context', 'targets', others.length === 0 ? 'loss' : 'loss 1', ...titles),
    first.map(({ from, to, targets, loss }, i) => [
      ...[from === to ? String(to) : `${from}-${to}`, String(targets), loss.toFixed(4)],
      ...others.flatMap((other) => [other[i].loss.toFixed(4), signed(other[i].loss - loss)]),
    ]),
    width,
  ).trimEnd();
}

function signed(value: number): string {
  return `${value < 0 ? '' : '+'}${value.toFixed(4)}`;
}

function csv(rows: readonly Row[]): string {
  return formatCsv(
    ['model', 'from', 'to', 'targets', 'loss'],
    rows.flatMap((row) => (row.by_position ?? []).map((position) => ({ model: nameOf(row), ...position }))),
  );
}

function chart(rows: readonly Row[]): string {
  return lineChart({
    title: 'Loss by position',
    x: 'log2 of the tokens of context',
    y: 'loss',
    series: rows.map((row) => ({
      name: nameOf(row),
      points: (row.by_position ?? []).map(({ to, loss }) => [Math.log2(to), loss] as const),
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
  const words = ['--seq-len', String(seqLen), '--batch-size', String(batchSize)];
  if (dataset !== undefined) words.push('--dataset', dataset);
  if (localPath !== undefined) words.push('--local-path', localPath);
  for (const text of ['data.val_fraction=0', 'data.shuffle=false', ...set]) words.push('--set', text);
  const asked = loadConfig({ env: io.env, flags: parseTrainFlags(words).layer, config: null }).config;
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
