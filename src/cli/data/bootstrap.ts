/** `trefoil data bootstrap`: some gigabytes of a source as local JSON Lines, for starts that wait for no network. */
import { type Command, Option } from 'commander';
import { bootstrap } from '../../data/bootstrap.js';
import { corpusOptions, describeFiles, openCorpus } from '../../data/sources/corpus.js';
import { type Io, ProgressLine, printJson, whileWaiting } from '../shared/io.js';
import { addSourceOptions, byteCount, megabytes, type SourceOptions, sourceConfig } from './source-options.js';

interface Options extends SourceOptions {
  readonly bytes: number;
  readonly out: string;
}

export function configure(command: Command, io: Io): void {
  addSourceOptions(command)
    .addOption(new Option('--bytes <n>', 'how much, such as 5GB').argParser(byteCount).default(5e9, '5GB'))
    .requiredOption('--out <folder>', 'folder for the files')
    .addHelpText('after', HELP)
    .action((options: Options) => run(options, io));
}

const HELP = `
Documents come in the shuffled order of training. An interrupted download
continues when the command is repeated; a larger --bytes adds to the folder.
Train from it with --dataset fineweb_edu_local --local-path FOLDER.
`;

async function run(options: Options, io: Io): Promise<void> {
  const { bytes, out: folder } = options;
  const config = sourceConfig(options, io);
  const opening = openCorpus(corpusOptions(config, { environment: io.env }));
  const spec = await whileWaiting(io, `waiting for the file list of ${config.data.source}`, opening);
  for (const text of describeFiles(spec)) io.err(text);
  const line = new ProgressLine(io);
  const result = await bootstrap({
    ...{ spec, folder, bytes },
    onProgress: (done) =>
      line.show(`${megabytes(done.bytes)} of ${megabytes(bytes)}, ${done.documents} documents, ${done.files} files`),
  });
  line.clear();
  if (options.json) printJson(io, { folder, ...result });
  else
    io.out(
      `${folder}: ${result.documents} documents, ${megabytes(result.bytes)} in ${result.files} files` +
        (result.exhausted ? '; the source has no more' : ''),
    );
}
