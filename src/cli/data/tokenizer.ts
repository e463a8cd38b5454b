/** `trefoil data tokenizer`: trains a byte-level BPE tokenizer on text of one's own. */
import { availableParallelism } from 'node:os';
import { corpusOptions, describeFiles, openCorpus } from '../../data/sources/corpus.js';
import { expectVocabulary, trainTokenizer } from '../../data/tokenizers/train/train.js';
import { type Io, ProgressLine, printJson } from '../shared/io.js';
import {
  configured,
  jsonOption,
  type OptionValues,
  parsed,
  repeated,
  required,
  wholeNumber,
} from '../shared/options.js';
import { SOURCE_OPTIONS, sizeText, sourceConfig } from './source-options.js';

const { tokenizer: _, ...SOURCES } = SOURCE_OPTIONS;
const OPTIONS = {
  ...SOURCES,
  vocabSize: parsed('--vocab-size <n>', 'tokens, with bytes and special ones', wholeNumber(1), 32_000),
  specialToken: repeated(
    '--special-token <text>',
    'a token besides <|endoftext|>, such as <|im_start|>; may be repeated',
  ),
  out: required('--out <folder>', 'folder for tokenizer.json and tokenizer_config.json'),
  json: jsonOption('{folder, vocab_size, documents, bytes, distinct_words, seconds}'),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
Byte-level BPE with the word pattern of GPT-2: every text can be encoded, and
decodes to itself. All cores count words unless --workers names fewer; the
result does not depend on their number. Python reads the folder too
(AutoTokenizer.from_pretrained). Train with --tokenizer FOLDER.
`;

export const configure = configured(OPTIONS, run, HELP);

async function run(options: Options, io: Io): Promise<void> {
  const { out: folder, vocabSize, specialToken = [] } = options;
  expectVocabulary(vocabSize, specialToken);
  const config = sourceConfig(options, io, { 'data.shuffle': 'false' });
  const spec = await openCorpus({ ...corpusOptions(config, { environment: io.env }), partBytes: 'auto' });
  for (const text of describeFiles(spec)) io.err(text);
  const line = new ProgressLine(io);
  const started = performance.now();
  const result = await trainTokenizer({
    spec,
    vocabSize,
    specialTokens: specialToken,
    folder,
    workers: options.workers ?? availableParallelism(),
    onCount: ({ bytes, units, totalUnits }) =>
      line.show(`counting words: ${sizeText(bytes)}, ${units}/${totalUnits} units`),
    onMerge: (merges, wanted) => line.show(`learning merges: ${merges} of ${wanted}`),
  });
  line.clear();
  const seconds = (performance.now() - started) / 1000;
  if (result.vocabSize < vocabSize)
    io.warn(`--vocab-size ${vocabSize}: the text has only ${result.vocabSize} tokens that occur twice; add text`);
  const { documents, bytes, distinctWords } = result;
  if (options.json)
    printJson(io, { folder, vocab_size: result.vocabSize, documents, bytes, distinct_words: distinctWords, seconds });
  else
    io.out(
      `${folder}: ${result.vocabSize} tokens from ${sizeText(bytes)} of text, ${distinctWords} distinct words, ` +
        `in ${seconds.toFixed(1)} s`,
    );
}
