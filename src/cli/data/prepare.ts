/** `trefoil data prepare`: tokenises a source once, to shards that any number of runs read by position. */
import { type Command, Option } from 'commander';
import { openCorpus } from '../../data/corpus/open.js';
import { prepareCorpus } from '../../data/shards/prepare-corpus.js';
import { corpusOptions } from '../../train/training-data.js';
import { type Io, ProgressLine, printJson } from '../shared/io.js';
import { addSourceOptions, byteCount, megabytes, type SourceOptions, sourceConfig } from './source-options.js';

interface Options extends SourceOptions {
  readonly out: string;
  readonly partBytes: number;
}

const BAR = 24;

export function configure(command: Command, io: Io): void {
  addSourceOptions(command)
    .requiredOption('--out <folder>', 'new folder for the shards')
    .addOption(
      new Option('--part-bytes <n>', 'about how much of a file becomes one shard')
        .argParser(byteCount)
        .default(256e6, '256MB'),
    )
    .addHelpText('after', HELP)
    .action((options: Options) => run(options, io));
}

const HELP = `
An interrupted command continues with the next part when it is repeated with the
same flags. The shards do not depend on --workers. Train from them with
--dataset tokens --local-path FOLDER and the same tokenizer.
`;

async function run(options: Options, io: Io): Promise<void> {
  const config = sourceConfig(options, io, { 'data.shuffle': 'false', 'data.val_fraction': '0' });
  const { tokenizer, workers } = config.data;
  const spec = await openCorpus({ ...corpusOptions(config, io.env), partBytes: options.partBytes });
  const line = new ProgressLine(io);
  const started = performance.now();
  let read = 0;
  const index = await prepareCorpus({
    ...{ spec, tokenizer, workers, folder: options.out },
    onNote: io.err,
    onProgress: ({ parts, totalParts, documents, tokens, bytes }) => {
      read = bytes;
      const filled = Math.round((BAR * parts) / totalParts);
      const speed = megabytes(bytes / ((performance.now() - started) / 1000));
      line.show(
        `[${'#'.repeat(filled)}${'.'.repeat(BAR - filled)}] ${parts}/${totalParts} parts, ${documents} documents, ` +
          `${(tokens / 1e6).toFixed(1)}M tokens, ${speed}/s`,
      );
    },
  });
  line.clear();
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
      `${options.out}: ${documents} documents, ${tokens} tokens in ${shards.length} shards, ` +
        `${megabytes(read)} of text in ${seconds.toFixed(1)} s${skippedFiles > 0 ? `; ${skippedFiles} files were no text` : ''}`,
    );
}
