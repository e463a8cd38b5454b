/** `trefoil data prepare`: tokenises a source once, to shards that any number of runs read by position. */
import { availableParallelism } from 'node:os';
import { InvalidArgumentError } from 'commander';
import { GROUP_BYTES, type PartNumber } from '../../data/shards/groups.js';
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
  part: parsed('--part <i/n>', 'only part i of n, for one of n machines; data join joins them', partNumber),
  shardBytes: parsed(
    '--shard-bytes <n>',
    'text after which a new shard begins; the same for all parts (default: 512 MiB)',
    byteCount,
    GROUP_BYTES,
    '512MiB',
  ),
};
type Options = OptionValues<typeof OPTIONS>;

const BAR = 24;

const HELP = `
All cores are used unless --workers names fewer. An interrupted command
continues with the next part when it is repeated with the same flags. The shards
depend neither on --workers nor on --part-bytes, nor on how many machines made
them: --part 1/8 to 8/8, started anywhere with the same --out on a shared disk,
then trefoil data join, give the files of one command without --part. A part is
a run of whole shards, so more parts than shards leave some empty: for a small
corpus set --shard-bytes. Train from them with --local-path FOLDER and the same
tokenizer.
`;

/** `3/8` */
function partNumber(text: string): PartNumber {
  const [, index, count] = /^(\d{1,6})\/(\d{1,6})$/.exec(text.trim()) ?? [];
  const part = { index: Number(index), count: Number(count) };
  if (!(part.index >= 1 && part.index <= part.count))
    throw new InvalidArgumentError('It must be i/n with i from 1 to n, such as 3/8.');
  return part;
}

export const configure = configured(OPTIONS, run, HELP);

async function run(options: Options, io: Io): Promise<void> {
  const config = sourceConfig(options, io, { 'data.shuffle': 'false', 'data.val_fraction': '0' });
  const base = corpusOptions(config, { environment: io.env });
  const { part, shardBytes: groupBytes } = options;
  const spec = await openCorpus({ ...base, partBytes: options.partBytes ?? 'auto', groupBytes });
  const line = new ProgressLine(io);
  const started = performance.now();
  let read = 0;
  const { index, report } = await prepareCorpus({
    spec,
    tokenizerName: config.data.tokenizer,
    folder: options.out,
    part,
    groupBytes,
    workers: options.workers ?? availableParallelism(),
    onNote: io.err,
    onProgress: ({ parts, totalParts, documents, tokens, bytes }) => {
      read = bytes;
      const filled = Math.round((BAR * parts) / totalParts);
      const speed = sizeText(bytes / ((performance.now() - started) / 1000));
      line.show(
        `[${'#'.repeat(filled)}${'.'.repeat(BAR - filled)}] ${parts}/${totalParts} units, ${documents} documents, ` +
          `${(tokens / 1e6).toFixed(1)}M tokens, ${speed}/s`,
      );
    },
  });
  line.clear();
  for (const text of describeFiles(spec, report)) io.err(text);
  const seconds = (performance.now() - started) / 1000;
  const { documents, tokens, shards, skippedFiles, checksum } = index;
  const name = part === undefined ? options.out : `${options.out}, part ${part.index} of ${part.count}`;
  if (options.json)
    printJson(io, {
      folder: options.out,
      ...(part && { part: part.index, parts: part.count }),
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
      `${name}: ${plural(documents, 'document')}, ${tokens} tokens in ${plural(shards.length, 'shard')}, ` +
        `${sizeText(read)} of text in ${seconds.toFixed(1)} s`,
    );
}
