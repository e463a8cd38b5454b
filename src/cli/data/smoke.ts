/** `trefoil data smoke`: does the source give batches, and how soon? */
import { DATA_SOURCES } from '../../config/data-sources.js';
import { createTokenizer } from '../../data/tokenizer.js';
import { openTrainingData } from '../../train/training-data.js';
import { type Io, printJson, whileWaiting } from '../shared/io.js';
import { configured, type OptionValues, parsed, wholeNumber } from '../shared/options.js';
import { datasetOption, SOURCE_OPTIONS, sourceConfig } from './source-options.js';

const OPTIONS = {
  ...SOURCE_OPTIONS,
  dataset: datasetOption(DATA_SOURCES),
  seqLen: parsed('--seq-len <n>', 'tokens in a sequence', wholeNumber(1), 1024),
  batchSize: parsed('--batch-size <n>', 'sequences in a batch', wholeNumber(1), 1),
  // As the PyTorch runbooks spell it.
  batch: parsed('--batch <n>', 'same as --batch-size', wholeNumber(1)).hideHelp().conflicts('batchSize'),
  batches: parsed('--batches <n>', 'batches to fetch', wholeNumber(1), 4),
  timeout: parsed('--timeout <seconds>', 'time for each', wholeNumber(1), 60),
};
type Options = OptionValues<typeof OPTIONS>;

const SHOWN_TOKENS = 40;

const HELP = `
Opens the source as training would and takes a few batches. Exit code 6 if a
batch takes longer than --timeout. HF_ENDPOINT sets a mirror of the hub,
HF_TOKEN the token for datasets that require one.
`;

export const configure = configured(OPTIONS, smoke, HELP);

async function smoke(options: Options, io: Io): Promise<void> {
  if (options.batch !== undefined) io.warn(`--batch ${options.batch}: taken as --batch-size; --batches says how many`);
  const config = sourceConfig(options, io, {
    'train.seq_len': String(options.seqLen),
    'train.batch_size': String(options.batch ?? options.batchSize),
    'data.loader_timeout': String(options.timeout),
    'data.val_fraction': '0',
  });
  const started = performance.now();
  const opening = openTrainingData(config, io.err, io.err, { environment: io.env, terminal: io.stderr });
  const loader = await whileWaiting(io, `waiting for ${config.data.source}`, opening);
  try {
    const times: number[] = [];
    let tokens = 0;
    let sample = '';
    for (let batch = 0; batch < options.batches; batch++) {
      const asked = batch === 0 ? started : performance.now();
      if (loader.ready) await whileWaiting(io, `waiting for batch ${batch + 1} of ${options.batches}`, loader.ready(1));
      const { inputs } = loader.next();
      times.push((performance.now() - asked) / 1000);
      tokens += inputs.length;
      if (batch === 0) sample = createTokenizer(config.data.tokenizer).decode(inputs.subarray(0, SHOWN_TOKENS));
    }
    const [first, ...others] = times;
    const slowest = Math.max(0, ...others);
    const documents = loader.telemetry?.().documents ?? null;
    const { source } = config.data;
    if (options.json)
      printJson(io, {
        ok: true,
        source,
        first_batch_s: first,
        slowest_later_s: slowest,
        batches: times.length,
        tokens,
        documents,
        sample,
      });
    else {
      io.out(
        `${source}: first batch after ${first.toFixed(2)} s, the slowest of ${others.length} more took ${(1000 * slowest).toFixed(1)} ms`,
      );
      io.out(
        `${tokens} tokens${documents === null ? '' : ` of ${documents} documents`}; it begins: ${JSON.stringify(sample)}`,
      );
    }
  } finally {
    loader.close();
  }
}
