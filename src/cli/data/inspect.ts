/** `trefoil data inspect`: what is in a source, before a run is spent on it. */
import { DOCUMENT_SOURCES } from '../../config/data-sources.js';
import type { Config } from '../../config/schema.js';
import { type Inspection, inspectCorpus, inspectShards } from '../../data/inspect.js';
import { corpusOptions, describeFiles, openCorpus } from '../../data/sources/corpus.js';
import { createTokenizer } from '../../data/tokenizer.js';
import { UsageError } from '../../errors.js';
import { wrapText } from '../../text.js';
import { openTrainingData } from '../../train/training-data.js';
import { type Io, printJson } from '../shared/io.js';
import { configured, type OptionValues, parsed, wholeNumber } from '../shared/options.js';
import { DEFAULT_WIDTH, formatTable, right } from '../shared/table.js';
import { datasetOption, SOURCE_OPTIONS, sizeText, sourceConfig } from './source-options.js';

const OPTIONS = {
  ...SOURCE_OPTIONS,
  dataset: datasetOption([...DOCUMENT_SOURCES, 'tokens']),
  documents: parsed('--documents <n>', 'look at the first n', wholeNumber(1), 1000),
  samples: parsed('--samples <n>', 'beginnings of documents to show', wholeNumber(0), 3),
  steps: parsed('--steps <n>', 'of a mixture: train.steps, the length of the run', wholeNumber(1)),
  ranks: parsed('--ranks <n>', 'of a mixture: ranks of the run', wholeNumber(1), 1),
};
type Options = OptionValues<typeof OPTIONS>;

const SAMPLE_LENGTH = 160;
const BAR = 40;

export const configure = configured(
  OPTIONS,
  run,
  `
Prepared shards (--dataset tokens) are counted whole, and their hashes compared.
A mixture (data.sources of a config) is shown as a run takes it: for each
source tokens, share, epochs, and whether one ends before the run.
`,
);

async function run(options: Options, io: Io): Promise<void> {
  const config = sourceConfig(options, io);
  if (config.data.sources !== null) return inspectMixture(config, options, io);
  const { source, path } = config.data;
  const tokenizer = createTokenizer(config.data.tokenizer);
  const shown = { samples: options.samples, sampleLength: SAMPLE_LENGTH };
  let found: Inspection;
  if (source === 'tokens') {
    if (path === null) throw new UsageError('data.path: needed by data.source tokens (--local-path)');
    found = inspectShards(path, tokenizer, shown);
  } else {
    // The hub may take a while to answer, or never do: say whom the command waits for.
    if (source === 'hub')
      io.err(`asking the Hugging Face hub for ${config.data.hub_dataset}; for files of yours give --local-path`);
    const spec = await openCorpus(corpusOptions(config, { environment: io.env }));
    for (const text of describeFiles(spec)) io.err(text);
    found = await inspectCorpus(spec, tokenizer, options.documents, shown);
  }
  if (options.json) printJson(io, { source, tokenizer: tokenizer.name, ...found });
  else io.out(report(found));
}

interface MixtureRow {
  readonly name: string;
  readonly weight: number;
  /** Training tokens of the source; null without end. */
  readonly tokens_per_epoch: number | null;
  /** Tokens that the run takes from it. */
  readonly tokens: number;
  readonly share: number;
  readonly epochs: number | null;
  readonly max_epochs: number | null;
}

/** The tokens that a run takes from each source. Opens them as training would, which tokenises what is not tokenised yet. */
async function inspectMixture(config: Config, options: Options, io: Io): Promise<void> {
  const { data, train } = config;
  const steps = options.steps ?? train.steps;
  const perStep = train.batch_size * train.accumulate_grad_batches * options.ranks;
  const loader = await openTrainingData(config, io.err, io.err, { environment: io.env, terminal: io.stderr });
  try {
    const taken = loader.sources!({ sample: steps * perStep });
    const total = taken.reduce((sum, { tokens }) => sum + tokens, 0);
    const rows = taken.map(({ name, tokens, epoch, tokensPerEpoch }): MixtureRow => {
      const { weight, epochs } = data.sources!.find((one) => one.name === name)!;
      const isEndless = !Number.isFinite(tokensPerEpoch);
      return {
        ...{ name, weight, tokens, share: tokens / total },
        tokens_per_epoch: isEndless ? null : tokensPerEpoch,
        epochs: isEndless ? null : epoch,
        max_epochs: isEndless ? null : epochs,
      };
    });
    const end = loader.firstEnd!(steps * perStep);
    const ends = end && { source: end.name, after_step: Math.floor(end.after / perStep) };
    if (options.json) printJson(io, { source: data.source, steps, tokens: total, sources: rows, ends });
    else io.out(mixtureReport(rows, steps, total, ends));
  } finally {
    loader.close();
  }
}

function mixtureReport(
  rows: readonly MixtureRow[],
  steps: number,
  total: number,
  ends: { source: string; after_step: number } | null,
): string {
  const percent = (share: number) => `${(100 * share).toFixed(2)} %`;
  return [
    `${steps} steps take ${total} tokens`,
    '',
    formatTable(
      ['source', ...right('weight', 'share', 'tokens taken', 'tokens in it', 'epochs', 'at most')],
      rows.map((row) => [
        ...[row.name, percent(row.weight), percent(row.share), String(row.tokens)],
        ...[row.tokens_per_epoch ?? 'no end', row.epochs?.toFixed(2) ?? '', row.max_epochs ?? ''].map(String),
      ]),
    ),
    ends === null
      ? 'no source ends before the run'
      : `${ends.source} ends after step ${ends.after_step}, and the run with it: raise its epochs, lower its weight, ` +
        'or train fewer steps',
  ].join('\n');
}

function report({ complete, documents, empty, tokens, bytes, lengths, histogram, samples }: Inspection): string {
  const most = Math.max(1, ...histogram.map((row) => row.documents));
  const text =
    bytes === null ? '' : `, ${sizeText(bytes)} of text, ${(bytes / Math.max(1, tokens)).toFixed(2)} bytes a token`;
  return [
    `${documents} documents${complete ? '' : ' (the first)'}, ${tokens} tokens${text}${empty > 0 ? `, ${empty} empty` : ''}`,
    `tokens of a document: ${lengths.min} least, ${lengths.p50} median, ${lengths.mean.toFixed(0)} mean, ${lengths.p95} p95, ${lengths.max} most`,
    '',
    formatTable(
      [...right('tokens', 'documents'), ''],
      histogram.map((row) => [
        `${row.from}-${row.to - 1}`,
        String(row.documents),
        '#'.repeat(Math.ceil((BAR * row.documents) / most)),
      ]),
    ),
    ...samples.map((sample) =>
      wrapText(`${sample.tokens} tokens: ${JSON.stringify(sample.text)}`, DEFAULT_WIDTH).join('\n'),
    ),
  ].join('\n');
}
