import { describe, expect, it } from 'vitest';
import { openCorpus } from '../sources/corpus.js';
import { localOptions } from '../testing/corpora.js';
import { testFolder } from '../testing/folder.js';
import { StreamLoader } from './stream-loader.js';

const long = process.env['TREFOIL_LONG'] === '1';
const DOCUMENTS = long ? 10_000_000 : 4_000_000;
const MOMENTS = 50;
const MIB = 2 ** 20;
/** Limit of the memory that may remain of half of the documents. */
const MAX_MIB = 32;
const folder = testFolder();

describe('memory', () => {
  it(`stays flat over ${DOCUMENTS} documents`, async () => {
    const lines = Array.from({ length: 100_000 }, (_, index) => `{"text":"${String(index).repeat(8)}"}\n`);
    const spec = await openCorpus(localOptions('jsonl', folder.write('a.jsonl', lines.join('')), { shuffle: true }));
    const loader = new StreamLoader({
      spec,
      tokenizer: 'byte',
      sequenceLength: 1024,
      batchSize: 8,
      workers: 2,
      documentBatch: 256,
      prefetch: true,
      queue: 4,
      timeout: 60,
    });
    // The least of many moments: what remains after a collection, whenever one happens.
    const quarters: number[] = [];
    const growth = () => quarters[quarters.length - 1] - quarters[quarters.length - 3];
    // The heaps of the threads grow to their size in the first quarter, on a busy machine also later; a byte kept of each
    // word would be seen in every quarter.
    while (quarters.length < 4 || (growth() >= MAX_MIB && quarters.length < 8)) {
      let least = Number.POSITIVE_INFINITY;
      for (let moment = 1; moment <= MOMENTS; moment++) {
        const documents = (DOCUMENTS / 4) * (quarters.length + moment / MOMENTS);
        while (loader.telemetry().documents < documents) {
          await loader.ready(1);
          loader.next();
        }
        least = Math.min(least, process.memoryUsage().rss / MIB);
      }
      quarters.push(least);
    }
    loader.close();
    expect(growth(), quarters.map((value) => value.toFixed(0)).join(' ')).toBeLessThan(MAX_MIB);
    expect(loader.state().sample).toBeGreaterThan(0);
  });
});
