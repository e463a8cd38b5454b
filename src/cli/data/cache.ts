/** `trefoil data cache`: lists the tokenised text and the fetched data on this machine, and removes them. */
import { type CacheEntry, clearCache, listCache, shrinkCache } from '../../data/shards/cache.js';
import { defaultCacheFolder } from '../../data/sources/range-cache.js';
import { type Io, printJson } from '../shared/io.js';
import { configured, flag, jsonOption, type OptionValues, parsed } from '../shared/options.js';
import { formatTable, right } from '../shared/table.js';
import { byteCount, sizeText } from './source-options.js';

const OPTIONS = {
  clear: flag('--clear', 'remove everything except builds in progress').conflicts('limit'),
  limit: parsed('--limit <n>', 'remove the least recently used shards down to a size, such as 2GB', byteCount),
  json: jsonOption(),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
The cache is in $TREFOIL_CACHE/data, else in the user's cache folder. It holds
the shards of text and JSON Lines sources, and data fetched from the hub.
Training keeps each of the two below data.cache_gb. What is removed is tokenized
or fetched again when a run needs it.
`;

export const configure = configured(OPTIONS, run, HELP);

function run({ clear, limit, json }: Options, io: Io): void {
  const folder = defaultCacheFolder(io.env);
  const removed = clear ? clearCache(folder) : limit === undefined ? [] : shrinkCache(folder, limit);
  const entries = listCache(folder);
  const bytes = sum(entries);
  if (json) {
    const describe = ({ name, kind, bytes: size, lastUsed, tokens, tokenizer }: CacheEntry) => ({
      name,
      kind,
      bytes: size,
      tokens,
      tokenizer,
      last_used: new Date(lastUsed).toISOString(),
    });
    printJson(io, { folder, bytes, entries: entries.map(describe), removed: removed.map(describe) });
    return;
  }
  if (removed.length > 0) io.out(`removed ${removed.length} entries, ${sizeText(sum(removed))}`);
  io.out(`${folder}: ${entries.length} entries, ${sizeText(bytes)}`);
  if (entries.length === 0) return;
  io.out('');
  io.out(
    formatTable(
      ['entry', 'kind', ...right('size', 'tokens'), 'last used'],
      entries.map(({ name, kind, bytes: size, tokens, lastUsed }) => [
        ...[name.slice(0, 12), kind, sizeText(size), tokens === null ? '' : String(tokens)],
        new Date(lastUsed).toISOString().slice(0, 16).replace('T', ' '),
      ]),
    ),
  );
}

function sum(entries: readonly CacheEntry[]): number {
  return entries.reduce((total, { bytes }) => total + bytes, 0);
}
