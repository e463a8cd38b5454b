import { describe, expect, it } from 'vitest';
import { openCorpus } from '../sources/corpus.js';
import { localOptions } from '../testing/corpora.js';
import { testFolder } from '../testing/folder.js';
import { StreamLoader } from './stream-loader.js';

const long = process.env['TREFOIL_LONG'] === '1';
const DOCUMENTS = long ? 10_000_000 : 4_000_000;
const MIB = 2 ** 20;
const folder = testFolder();

describe('memory', () => {
  it(`stays flat over ${DOCUMENTS} documents`, async () => {
    const lines = Array.from({ length: 100_000 }, (_, index) => `{"text":"${String(index).repeat(8)}"}\n`);
    const spec = await openCorpus(localOptions('jsonl', folder.write('a.jsonl', lines.join('')), { shuffle: true }));
    const loader = new StreamLoader({
      spec,
      tokenizer: 'byte',
      seq_len: 1024,
      batch_size: 8,
      workers: 2,
      documentBatch: 256,
      prefetch: true,
      queue: 4,
      timeout: 60,
    });
    const used: number[] = [];
    let checkpoint = 0;
    while (loader.telemetry().documents < DOCUMENTS) {
      await loader.ready(1);
      loader.next();
      if (loader.telemetry().documents < checkpoint) continue;
      checkpoint += DOCUMENTS / 200;
      used.push(process.memoryUsage().rss / MIB);
    }
    loader.close();
    // The heaps of the threads grow to their size in the first quarter; then a byte kept of each word would be seen.
    // The least of many moments: what remains after a collection, whenever one happens.
    const [early, late] = [Math.min(...used.slice(60, 110)), Math.min(...used.slice(160))];
    expect(late - early, used.map((value) => value.toFixed(0)).join(' ')).toBeLessThan(32);
    expect(loader.state().sample).toBeGreaterThan(0);
  });
});
