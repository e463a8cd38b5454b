/** Run by the cache test as another process: builds a cache entry, slowly, and says how far it is. */

import { openCached } from '../shards/cache.js';
import { listTextSource } from '../shards/prepare.js';
import { createByteTokenizer } from '../tokenizers/byte.js';

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
const reader = await openCached(await listTextSource('jsonl', path), slow, { folder });
process.stdout.write(`done ${reader.index.checksum}\n`);
reader.close();
