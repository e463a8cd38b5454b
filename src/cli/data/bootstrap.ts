/** `trefoil data bootstrap`: some gigabytes of a source as local JSON Lines, for starts that wait for no network. */
import { bootstrap } from '../../data/bootstrap.js';
import { corpusOptions, describeFiles, openCorpus } from '../../data/sources/corpus.js';
import { type Io, ProgressLine, printJson, whileWaiting } from '../shared/io.js';
import { configured, type OptionValues, parsed, required } from '../shared/options.js';
import { byteCount, SOURCE_OPTIONS, sizeText, sourceConfig } from './source-options.js';

const OPTIONS = {
  ...SOURCE_OPTIONS,
  bytes: parsed('--bytes <n>', 'how much, such as 5GB', byteCount, 5e9, '5GB'),
  out: required('--out <folder>', 'folder for the files'),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
Documents come in the shuffled order of training. An interrupted download
continues when the command is repeated; a larger --bytes adds to the folder.
Train from it with --dataset files --local-path FOLDER.
`;

export const configure = configured(OPTIONS, run, HELP);

async function run(options: Options, io: Io): Promise<void> {
  const { bytes, out: folder } = options;
  const config = sourceConfig(options, io);
  const opening = openCorpus(corpusOptions(config, { environment: io.env }));
  const spec = await whileWaiting(io, `waiting for the file list of ${config.data.source}`, opening);
  for (const text of describeFiles(spec)) io.err(text);
  const line = new ProgressLine(io);
  const result = await bootstrap({
    spec,
    folder,
    bytes,
    onProgress: (done) =>
      line.show(`${sizeText(done.bytes)} of ${sizeText(bytes)}, ${done.documents} documents, ${done.files} files`),
  });
  line.clear();
  if (options.json) printJson(io, { folder, ...result });
  else
    io.out(
      `${folder}: ${result.documents} documents, ${sizeText(result.bytes)} in ${result.files} files` +
        (result.exhausted ? '; the source has no more' : ''),
    );
}
