/** `trefoil backup`: archives a run as .tar.gz. */
import { basename, join, resolve } from 'node:path';
import { visible } from '../text.js';
import { backupRun } from '../watch/backup.js';
import { type Io, printJson } from './shared/io.js';
import { choice, configured, flag, jsonOption, type OptionValues } from './shared/options.js';
import { dirOption } from './shared/run-options.js';

const OPTIONS = {
  dir: dirOption(),
  out: flag('--out <file>', 'archive to write (default: <run>_<time>.tar.gz)'),
  checkpoints: choice(
    '--checkpoints <which>',
    'newest checkpoint that verifies, all, or none',
    ['latest', 'all', 'none'],
    'latest',
  ),
  json: jsonOption('{file, bytes, files, checkpoints, missed, elsewhere}'),
};
type Options = OptionValues<typeof OPTIONS>;

export const configure = configured(OPTIONS, backup);

async function backup({ dir, out, checkpoints, json }: Options, io: Io): Promise<void> {
  const stamp = new Date().toISOString().slice(0, 19).replace(/[-:]/g, '').replace('T', '_');
  const file = out ?? join('.', `${basename(resolve(dir))}_${stamp}.tar.gz`);
  const result = await backupRun(dir, file, checkpoints);
  if (json) return printJson(io, result);
  const steps = result.checkpoints.length > 0 ? `checkpoint of step ${result.checkpoints.join(', ')}` : 'no checkpoint';
  io.out(`${result.file}: ${result.files} files, ${(result.bytes / 2 ** 20).toFixed(1)} MiB, ${steps}`);
  for (const name of result.elsewhere) io.out(visible(`not in the archive: ${name}`));
  for (const name of result.missed) io.warn(visible(`${name} was deleted while it was read`));
}
