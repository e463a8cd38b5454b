/** `trefoil data join`: the parts of `data prepare --part` as one folder of shards. */
import { joinParts } from '../../data/shards/join.js';
import { plural } from '../../text.js';
import { type Io, ProgressLine, printJson } from '../shared/io.js';
import { configured, jsonOption, type OptionValues, required } from '../shared/options.js';

const OPTIONS = {
  out: required('--out <folder>', 'the --out of all parts'),
  json: jsonOption('{folder, documents, tokens, shards, skipped_files, checksum}'),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
Reads every file once to check its hash, then renames it: nothing is copied. The
result is, byte for byte, that of data prepare without --part. Repeat a command
that was interrupted: it goes on.
`;

export const configure = configured(OPTIONS, run, HELP);

function run({ out: folder, json }: Options, io: Io): void {
  const line = new ProgressLine(io);
  const index = joinParts(folder, ({ files, totalFiles }) => line.show(`checked ${files} of ${totalFiles} files`));
  line.clear();
  const { documents, tokens, shards, skippedFiles, checksum } = index;
  if (json) printJson(io, { folder, documents, tokens, shards: shards.length, skipped_files: skippedFiles, checksum });
  else io.out(`${folder}: ${plural(documents, 'document')}, ${tokens} tokens in ${plural(shards.length, 'shard')}`);
}
