/** `trefoil data prepare`: tokenises a source once, to shards that any number of runs read by position. */
import { availableParallelism } from 'node:os';
import { prepareCorpus } from '../../data/shards/prepare.js';
import { corpusOptions, describeFiles, openCorpus } from '../../data/sources/corpus.js';
import { plural } from '../../text.js';
import { type Io, ProgressLine, printJson } from '../shared/io.js';
import { configured, type OptionValues, parsed, required } from '../shared/options.js';
import { byteCount, SOURCE_OPTIONS, sizeText, sourceConfig } from './source-options.js';

const OPTIONS = {
  ...SOURCE_OPTIONS,
  out: required('--out <folder>', 'new folder for the shards'),
  partBytes: parsed(
    '--part-bytes <n>',
    'about how much of a file a thread tokenises at a time (default: 1/256 of all)',
    byteCount,
  ),
};
type Options = OptionValues<typeof OPTIONS>;

const BAR = 24;

const HELP = `
All cores are used unless --workers names fewer. An interrupted command
continues with the next part when it is repeated with the same flags. The shards
depend neither on --workers nor on --part-bytes. Train from them with
--local-path FOLDER and the same tokenizer.
`;

export const configure = configured(OPTIONS, run, HELP);

async function run(options: Options, io: Io): Promise<void> {
  const config = sourceConfig(options, io, { 'data.shuffle': 'false', 'data.val_fraction': '0' });
  const base = corpusOptions(config, { environment: io.env });
  const spec = await openCorpus({ ...base, partBytes: options.partBytes ?? 'auto' });
  const line = new ProgressLine(io);
  const started = performance.now();
  let read = 0;
  const { index, report } = await prepareCorpus({
    spec,
    tokenizerName: config.data.tokenizer,
    folder: options.out,
    workers: options.workers ?? availableParallelism(),
    onNote: io.err,
    onProgress: ({ parts, totalParts, documents, tokens, bytes }) => {
      read = bytes;
      const filled = Math.round((BAR * parts) / totalParts);
      const speed = sizeText(bytes / ((performance.now() - started) / 1000));
      line.show(
        `[${'#'.repeat(filled)}${'.'.repeat(BAR - filled)}] ${parts}/${totalParts} parts, ${documents} documents, ` +
          `${(tokens / 1e6).toFixed(1)}M tokens, ${speed}/s`,
      );
    },
  });
  line.clear();
  for (const text of describeFiles(spec, report)) io.err(text);
  const seconds = (performance.now() - started) / 1000;
  const { documents, tokens, shards, skippedFiles, checksum } = index;
  if (options.json)
    printJson(io, {
      folder: options.out,
      documents,
      tokens,
      shards: shards.length,
      skipped_files: skippedFiles,
      checksum,
      bytes: read,
      seconds,
    });
  else
    io.out(
      `${options.out}: ${plural(documents, 'document')}, ${tokens} tokens in ${plural(shards.length, 'shard')}, ` +
        `${sizeText(read)} of text in ${seconds.toFixed(1)} s`,
    );
}
