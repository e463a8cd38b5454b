/** `trefoil data inspect`: what is in a source, before a run is spent on it. */
import { DOCUMENT_SOURCES } from '../../config/data-sources.js';
import { type Inspection, inspectCorpus, inspectShards } from '../../data/inspect.js';
import { corpusOptions, describeFiles, openCorpus } from '../../data/sources/corpus.js';
import { createTokenizer } from '../../data/tokenizer.js';
import { UsageError } from '../../errors.js';
import { wrapText } from '../../text.js';
import { type Io, printJson } from '../shared/io.js';
import { configured, type OptionValues, parsed, wholeNumber } from '../shared/options.js';
import { DEFAULT_WIDTH, formatTable, right } from '../shared/table.js';
import { datasetOption, SOURCE_OPTIONS, sizeText, sourceConfig } from './source-options.js';

const OPTIONS = {
  ...SOURCE_OPTIONS,
  dataset: datasetOption([...DOCUMENT_SOURCES, 'tokens']),
  documents: parsed('--documents <n>', 'look at the first n', wholeNumber(1), 1000),
  samples: parsed('--samples <n>', 'beginnings of documents to show', wholeNumber(0), 3),
};
type Options = OptionValues<typeof OPTIONS>;

const SAMPLE_LENGTH = 160;
const BAR = 40;

export const configure = configured(
  OPTIONS,
  run,
  '\nPrepared shards (--dataset tokens) are counted whole, and their hashes compared.\n',
);

async function run(options: Options, io: Io): Promise<void> {
  const config = sourceConfig(options, io, { 'data.val_fraction': '0' });
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
