/** Run by the cache test as another process: builds a cache entry, slowly, and prints its progress. */

import { openCached } from '../shards/cache.js';
import { openCorpus } from '../sources/corpus.js';
import { createByteTokenizer } from '../tokenizers/bytes.js';
import { localOptions } from './corpora.js';

const [path, folder, delay, last] = process.argv.slice(2);
/** Until it is killed. */
const FOR_EVER_MS = 600_000;
const byte = createByteTokenizer();
let encoded = 0;
const slow = {
  ...byte,
  encode(text: string): Int32Array {
    process.stdout.write(`document ${encoded}\n`);
    const pause = encoded++ === Number(last) ? FOR_EVER_MS : Number(delay);
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, pause);
    return byte.encode(text);
  },
};
const spec = await openCorpus(localOptions('jsonl', path));
const { reader } = await openCached(spec, slow, 'byte', { folder });
process.stdout.write(`done ${reader.index.checksum}\n`);
reader.close();
