/** Looking ahead changes nothing: not the batches, not the position that a checkpoint keeps. */

import { writeFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { TrefoilError } from '../../errors.js';
import fc from '../../testing/properties.js';
import { createLoader, type LoaderOptions } from '../loader.js';
import { openCorpus } from '../sources/corpus.js';
import { hubOptions } from '../testing/corpora.js';
import { testFolder } from '../testing/folder.js';
import { writeShards } from '../testing/shards.js';
import { AheadLoader } from './ahead-loader.js';
import { StreamLoader } from './stream-loader.js';

const folder = testFolder();
const shards = folder.path('bytes');
const documents = Array.from({ length: 60 }, (_, document) =>
  Array.from({ length: 5 + ((document * 37) % 60) }, (_, index) => 1 + ((document * 101 + index * 7) % 255)),
);
writeShards(shards, documents);

const options: LoaderOptions = {
  source: 'tokens',
  path: shards,
  tokenizer: 'byte',
  valFraction: 0.1,
  seed: 42,
  seqLen: 16,
  batchSize: 3,
};

describe('a loader that looks ahead', () => {
  it('gives the same batches and the same positions, however far it looks and wherever it is resumed', async () => {
    const plain = await createLoader(options);
    const [batches, positions] = [[] as Int32Array[], [] as object[]];
    for (let i = 0; i < 30; i++) {
      positions.push(plain.state());
      batches.push(plain.next().inputs);
    }
    const loader = new AheadLoader(await createLoader(options));
    const move = fc.oneof(
      fc.record({ kind: fc.constant('look' as const), count: fc.integer({ min: 1, max: 4 }) }),
      fc.record({ kind: fc.constant('next' as const), count: fc.integer({ min: 1, max: 3 }) }),
      fc.record({ kind: fc.constant('restore' as const), count: fc.integer({ min: 0, max: 20 }) }),
    );
    fc.assert(
      fc.property(fc.array(move, { maxLength: 12 }), (moves) => {
        let at = 0;
        loader.restore(positions[0]);
        for (const { kind, count } of moves) {
          if (kind === 'restore') {
            at = count;
            loader.restore(positions[at]);
          } else if (kind === 'look')
            expect(loader.lookAhead(count).map(({ inputs }) => inputs)).toEqual(batches.slice(at, at + count));
          else
            for (let i = 0; i < count && at < 24; i++) {
              const [early] = loader.lookAhead(1);
              const batch = loader.next();
              expect(batch).toBe(early); // the very object: a device may have it already
              expect(batch.inputs).toEqual(batches[at++]);
            }
          expect(loader.state()).toEqual(positions[at]);
        }
      }),
      { numRuns: 200 },
    );
    expect([...loader.evalBatches(2)].map(({ inputs }) => inputs)).toEqual(
      [...plain.evalBatches(2)].map(({ inputs }) => inputs),
    );
    expect(loader.telemetry).toBeUndefined();
    plain.close();
    loader.close();
  });

  it('does not wait for a stream, and keeps its position', async () => {
    const file = folder.path('lines.jsonl');
    const lines = Array.from({ length: 400 }, (_, i) => JSON.stringify({ text: `document ${i} `.repeat(1 + (i % 9)) }));
    writeFileSync(file, `${lines.join('\n')}\n`);
    const spec = await openCorpus(hubOptions('', { source: 'jsonl', path: file, valFraction: 0.1 }));
    const open = () =>
      new StreamLoader({
        spec,
        tokenizer: 'byte',
        sequenceLength: 32,
        batchSize: 2,
        workers: 1,
        documentBatch: 16,
        prefetch: true,
        queue: 3,
        timeout: 20,
      });
    const plain = await open();
    const loader = new AheadLoader(await open());
    expect(loader.lookAhead(1)).toEqual([]); // nothing was read yet
    for (let i = 0; i < 20; i++) {
      expect(loader.state()).toEqual(plain.state());
      await Promise.all([plain.ready(1), loader.ready(1)]);
      expect(loader.next().inputs).toEqual(plain.next().inputs);
      loader.lookAhead(2);
      expect(loader.state()).toEqual(plain.state());
    }
    expect(loader.telemetry?.().documents).toBeGreaterThan(0);
    plain.close();
    loader.close();
  });

  it('throws the error of a source at the next request in order', async () => {
    const real = await createLoader(options);
    let left = 3;
    const next = real.next.bind(real);
    real.next = () => {
      if (left-- <= 0) throw new TrefoilError('the source is gone');
      return next();
    };
    const loader = new AheadLoader(real);
    expect(loader.lookAhead(5)).toEqual([]);
    for (let i = 0; i < 3; i++) loader.next();
    expect(() => loader.next()).toThrow('the source is gone');
    loader.close();
  });
});
