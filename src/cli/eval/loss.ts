/** `trefoil eval loss`: measures the loss of a model on a data source. */
import { type Command, Option } from 'commander';
import { parseTrainFlags } from '../../config/flags.js';
import { loadConfig } from '../../config/load.js';
import { parseConfig } from '../../config/parse.js';
import type { Config } from '../../config/schema.js';
import { UsageError } from '../../errors.js';
import { withEnvironment } from '../../infer/environment.js';
import { type LoadedModel, loadModel } from '../../infer/load-model.js';
import { evaluateSource } from '../../train/evaluate-source.js';
import { type DeviceChoice, deviceOption, openDevice } from '../shared/device.js';
import { type Io, printJson } from '../shared/io.js';
import { jsonOption, threadsOption, wholeNumber } from '../shared/options.js';

interface Options {
  readonly model: string;
  readonly dataset?: string;
  readonly localPath?: string;
  readonly seqLen: number;
  readonly batchSize: number;
  readonly batches: number;
  readonly set?: string[];
  readonly device: DeviceChoice;
  readonly threads?: number;
  readonly json?: boolean;
}

export function configure(command: Command, io: Io): void {
  const whole = (flags: string, meaning: string) => new Option(flags, meaning).argParser(wholeNumber(1));
  command
    .requiredOption('--model <path>', 'run folder, checkpoint, model.safetensors, or Hugging Face folder')
    .option(
      '--dataset <source>',
      'data.source: text, jsonl, tokens, fineweb_edu, fineweb_edu_local, synthetic, needle, stories (default: implied by the path)',
    )
    .option('--local-path <path>', 'data.path: file, folder or pattern of a local source')
    .addOption(whole('--seq-len <n>', 'tokens of a sample').default(1024))
    .addOption(whole('--batch-size <n>', 'samples of a batch').default(1))
    .addOption(whole('--batches <n>', 'at most this many batches').default(64))
    .option('--set <key=value>', 'set any key of data; may be repeated', (text: string, all: string[] = []) => [
      ...all,
      text,
    ])
    .addOption(deviceOption('where to compute'))
    .addOption(threadsOption())
    .addOption(jsonOption('{model, step, source, loss, perplexity, targets, batches, bits_per_byte, complete}'))
    .addHelpText('after', HELP)
    .action((options: Options) => run(options, io));
}

const HELP = `
The tokenizer is the model's. The source is read from its start, each target
once, the last short sample included. --set data.val_fraction=0.01 reads only
the part that a training run with this fraction and seed sets aside.
bpb: bits of loss per byte of UTF-8 text, comparable between tokenizers.
`;

async function run(options: Options, io: Io): Promise<void> {
  const loaded = loadModel(openDevice(options), options.model, 'f32');
  const { model, path, step, warnings } = loaded;
  try {
    for (const warning of warnings) io.warn(warning);
    const config = evaluationConfig(loaded, options, io);
    const { loss, perplexity, targets, batches, bitsPerByte, complete } = await evaluateSource(
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
    const { source } = config.data;
    if (options.json)
      printJson(io, {
        ...{ model: path, step, source, loss, perplexity, targets, batches },
        ...{ bits_per_byte: bitsPerByte, complete },
      });
    else
      io.out(
        `loss ${loss.toFixed(4)} | ppl ${perplexity.toFixed(2)} | ` +
          `${bitsPerByte === null ? '' : `bpb ${bitsPerByte.toFixed(4)} | `}${targets} targets in ${batches} batches` +
          `${complete ? '' : ' (more with --batches)'}, step ${step}`,
      );
  } finally {
    model.free();
  }
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
