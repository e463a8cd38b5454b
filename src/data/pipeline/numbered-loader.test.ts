import { describe, expect, it } from 'vitest';
import { UsageError } from '../../errors.js';
import { cpuMs } from '../../testing/cpu-time.js';
import fc from '../../testing/properties.js';
import { type Batch, IGNORED_TARGET } from '../batch.js';
import { createLoader, type Loader, type LoaderOptions } from '../loader.js';
import { testFolder } from '../testing/folder.js';
import { numberTokenizer, streamOf, writeShards } from '../testing/shards.js';
import type { LoaderState } from './position.js';

const folder = testFolder();
const byteShards = folder.path('bytes');
const documents = Array.from({ length: 120 }, (_, document) =>
  Array.from({ length: 5 + ((document * 37) % 60) }, (_, index) => 1 + ((document * 101 + index * 7) % 255)),
);
writeShards(byteShards, documents);
const stream = streamOf(documents);

const options = (change: Partial<LoaderOptions> = {}): LoaderOptions => ({
  source: 'tokens',
  path: byteShards,
  tokenizer: 'byte',
  valFraction: 0.1,
  seed: 42,
  seqLen: 16,
  batchSize: 3,
  ...change,
});

const contentOf = ({ inputs, targets, cuSeqlens, sampleIds, epoch, targetCount }: Batch): unknown => ({
  inputs: [...inputs],
  targets: [...targets],
  cuSeqlens: [...cuSeqlens],
  sampleIds,
  epoch,
  targetCount,
});
const take = (loader: Loader, count: number): unknown[] =>
  Array.from({ length: count }, () => contentOf(loader.next()));

async function using<Result>(
  change: Partial<LoaderOptions>,
  use: (loader: Loader) => Result,
): Promise<Awaited<Result>> {
  const loader = await createLoader(options(change));
  try {
    return await use(loader);
  } finally {
    loader.close();
  }
}

const variants: Partial<LoaderOptions>[] = [
  {},
  { shuffle: false },
  { documentMask: true },
  { valFraction: 0 },
  { source: 'synthetic', path: null, vocabSize: 1000 },
];

describe('resume', () => {
  it.each(variants)('gives the batches of an uninterrupted run, from any point on: %j', async (change) => {
    await using(change, async (whole) => {
      const states: string[] = [];
      const batches: unknown[] = [];
      // About two epochs and a half, so that the borders of epochs are among the points.
      for (let step = 0; step < 180; step++) {
        states.push(JSON.stringify(whole.state()));
        batches.push(contentOf(whole.next()));
      }
      await fc.assert(
        fc.asyncProperty(fc.nat(170), async (step) => {
          await using(change, (resumed) => {
            resumed.restore(JSON.parse(states[step]));
            expect(JSON.stringify(resumed.state())).toBe(states[step]);
            expect(take(resumed, 5)).toEqual(batches.slice(step, step + 5));
          });
        }),
        { numRuns: 20 },
      );
    });
  });

  it('is immediate however far the run was', async () => {
    await using({}, (loader) => {
      const far = 10 ** 12;
      loader.restore({ ...loader.state(), sample: far });
      const ms = cpuMs(() => expect(loader.next().epoch).toBe(Math.floor(far / loader.samplesPerEpoch)));
      expect(ms).toBeLessThan(10_000);
    });
  });

  it('continues with another number of ranks and another batch size where it was', async () => {
    const ids = await using({ batchSize: 1 }, (loader) =>
      Array.from({ length: 60 }, () => loader.next().sampleIds).flat(),
    );
    const state = await using({ batchSize: 6 }, (loader) => {
      for (let step = 0; step < 5; step++) loader.next();
      return loader.state();
    });
    const after: number[] = [];
    for (const rank of [0, 1, 2]) {
      await using({ batchSize: 2, world: 3, rank }, (loader) => {
        loader.restore(state);
        after.push(...loader.next().sampleIds);
      });
    }
    expect(after).toEqual(ids.slice(30, 36));
  });

  it('keeps the split of a run of an earlier version, which depended on the seed', async () => {
    const state = await using({ splitSeed: 42 }, (loader) => loader.state());
    const { split_seed: _, ...earlier } = state as Record<string, unknown>;
    await using({ splitSeed: 42 }, (loader) => loader.restore(earlier));
    await expect(using({}, (loader) => loader.restore(earlier))).rejects.toThrow(
      'split_seed is 1337, but was 42 when this run was saved',
    );
  });

  it('refuses other data, settings and shapes by name', async () => {
    const state = await using({}, (loader) => loader.state());
    const other = folder.path('other');
    writeShards(other, [[...documents[0], 1], ...documents.slice(1)]);
    const restoring = (change: Partial<LoaderOptions>, value: unknown = state) =>
      using(change, (loader) => loader.restore(value));
    await expect(restoring({ path: other })).rejects.toThrow(UsageError);
    await expect(restoring({ path: other })).rejects.toThrow(`data.path: ${other} holds other data than this run`);
    await expect(restoring({ seed: 43 })).rejects.toThrow('seed is 43, but was 42 when this run was saved');
    await expect(restoring({ seqLen: 8 })).rejects.toThrow('seq_len is 8, but was 16');
    await expect(restoring({ shuffle: false })).rejects.toThrow('shuffle is false, but was true');
    await expect(restoring({ valFraction: 0.2 })).rejects.toThrow('val_fraction is 0.2, but was 0.1');
    await expect(restoring({}, { ...state, sample: -1 })).rejects.toThrow('checkpoint: data position: sample');
    await expect(restoring({}, null)).rejects.toThrow('checkpoint: data position: value');
    const copy = folder.path('copy');
    writeShards(copy, documents);
    await restoring({ path: copy });
  });
});

it('sets the same documents aside for every seed of the order, and others for another seed of the split', async () => {
  const held = (change: Partial<LoaderOptions>) => using(change, (loader) => [...loader.evalBatches(9)].map(contentOf));
  const order = (change: Partial<LoaderOptions>) => using(change, (loader) => take(loader, 9));
  expect(await held({ seed: 1 })).toEqual(await held({ seed: 2 }));
  expect(await order({ seed: 1 })).not.toEqual(await order({ seed: 2 }));
  expect(await held({ splitSeed: 1 })).not.toEqual(await held({ splitSeed: 2 }));
});

describe('ranks', () => {
  it('take the same global batches, whatever their number', async () => {
    const global = 12;
    const shape = fc.constantFrom([1, 12, 1], [1, 3, 4], [2, 6, 1], [2, 2, 3], [3, 4, 1], [3, 2, 2]);
    const reference = await using({ batchSize: global }, (loader) => take(loader, 8) as { sampleIds: number[] }[]);
    await fc.assert(
      fc.asyncProperty(shape, async ([world, batchSize, accumulation]) => {
        const steps: number[][] = Array.from({ length: 8 }, () => []);
        for (let rank = 0; rank < world; rank++) {
          await using({ world, rank, batchSize }, (loader) => {
            for (const step of steps) {
              for (let call = 0; call < accumulation; call++) step.push(...loader.next().sampleIds);
            }
          });
        }
        const sorted = (ids: number[]): number[] => [...ids].sort((first, second) => first - second);
        expect(steps.map(sorted)).toEqual(reference.map((batch) => sorted(batch.sampleIds)));
      }),
      { numRuns: 12 },
    );
  });

  it('have the same state', async () => {
    const states: LoaderState[] = [];
    for (const rank of [0, 1]) {
      states.push(
        await using({ world: 2, rank }, (loader) => {
          loader.next();
          return loader.state() as LoaderState;
        }),
      );
    }
    expect(states[0]).toEqual(states[1]);
    expect(states[0].sample).toBe(6);
  });
});

describe('content', () => {
  it('is the corpus itself, in order, when nothing is shuffled or set aside', async () => {
    await using({ shuffle: false, valFraction: 0, batchSize: 1 }, (loader) => {
      for (let sample = 0; sample < loader.samplesPerEpoch; sample++) {
        const batch = loader.next();
        expect([...batch.inputs]).toEqual(stream.slice(sample * 16, sample * 16 + 16));
        const next = Array.from({ length: 16 }, (_, index) => stream[(sample * 16 + index + 1) % stream.length]);
        expect([...batch.targets]).toEqual(next);
      }
    });
  });

  it('never shows a validation token in training: every token has its own id here', async () => {
    for (const count of [60, 3]) {
      const path = folder.path(`unique-${count}`);
      const unique = Array.from({ length: count }, (_, document) =>
        Array.from({ length: 600 / count + 2 }, (_, index) => 1 + document * 300 + index),
      );
      const tokenizer = numberTokenizer(60_000);
      writeShards(path, unique, { ...tokenizer, identity: 'gpt2' });
      await using({ path, tokenizer: 'gpt2', seqLen: 8, valFraction: 0.15 }, (loader) => {
        const training = new Set<number>();
        for (let sample = 0; sample < 3 * loader.samplesPerEpoch; sample += 3) {
          const batch = loader.next();
          for (const token of [...batch.inputs, ...batch.targets]) training.add(token);
        }
        const validation = new Set<number>();
        for (const batch of loader.evalBatches(1000)) {
          for (const token of [...batch.inputs, ...batch.targets]) validation.add(token);
        }
        for (const shared of [0, IGNORED_TARGET]) validation.delete(shared); // separators have one id
        expect(validation.size).toBeGreaterThan(8);
        expect([...validation].filter((token) => training.has(token))).toEqual([]);
      });
    }
  });

  it('with document masks, cuts exactly behind separators and never predicts across', async () => {
    await using({ documentMask: true, batchSize: 4 }, (loader) => {
      for (let step = 0; step < 50; step++) {
        const { inputs, targets, cuSeqlens, targetCount } = loader.next();
        const cuts = new Set(cuSeqlens);
        for (let index = 0; index < inputs.length; index++) {
          const ends = inputs[index] === 0; // only the separator is 0 in this corpus
          expect(targets[index] === IGNORED_TARGET).toBe(ends);
          const rowEnd = (index + 1) % 16 === 0;
          expect(cuts.has(index + 1)).toBe(ends || rowEnd);
          if (!ends && !rowEnd) expect(targets[index]).toBe(inputs[index + 1]);
        }
        expect(targetCount).toBe(targets.filter((target) => target !== IGNORED_TARGET).length);
      }
    });
  });
});

describe('evalBatches', () => {
  const samplesOf = (batches: Iterable<Batch>): number[][] =>
    [...batches].map((batch) => batch.sampleIds.filter((_, row) => batch.targets[row * 16] !== IGNORED_TARGET));

  it('is the same at every call, and leaves training where it is', async () => {
    await using({}, (loader) => {
      loader.next();
      const before = JSON.stringify(loader.state());
      const first = [...loader.evalBatches(4)].map(contentOf);
      expect([...loader.evalBatches(4)].map(contentOf)).toEqual(first);
      expect(JSON.stringify(loader.state())).toBe(before);
    });
  });

  it.each([1, 2, 3])('covers every sample once over %i ranks, in batches of equal number and shape', async (world) => {
    const perRank: number[][][] = [];
    let available = 0;
    for (let rank = 0; rank < world; rank++) {
      await using({ world, rank, batchSize: 4 }, (loader) => {
        available = loader.validationSamples;
        const batches = [...loader.evalBatches(1000)];
        expect(batches.every((batch) => batch.inputs.length === 64 && batch.sampleIds.length === 4)).toBe(true);
        expect(batches.reduce((sum, batch) => sum + batch.targetCount, 0)).toBe(16 * samplesOf(batches).flat().length);
        perRank.push(samplesOf(batches));
      });
    }
    expect(new Set(perRank.map((batches) => batches.length)).size).toBe(1);
    const all = perRank.flat(2).sort((first, second) => first - second);
    expect(all).toEqual(Array.from({ length: available }, (_, sample) => sample));
  });

  it('spreads a small number over all of the validation part', async () => {
    await using({ valFraction: 0.4, batchSize: 2 }, (loader) => {
      const ids = samplesOf(loader.evalBatches(3)).flat();
      expect(ids.length).toBe(6);
      expect(new Set(ids).size).toBe(6);
      expect(ids.at(-1)).toBeGreaterThan(0.8 * (loader.validationSamples - 1));
    });
  });

  it('is endless for synthetic data, and apart from training', async () => {
    await using({ source: 'synthetic', path: null, vocabSize: 1000 }, (loader) => {
      const batches = [...loader.evalBatches(5)];
      expect(batches.length).toBe(5);
      expect([...batches[0].inputs]).not.toEqual([...loader.next().inputs]);
    });
  });

  it('says what to set when nothing was set aside', async () => {
    await expect(using({ valFraction: 0 }, (loader) => loader.evalBatches(1))).rejects.toThrow(
      'data.val_fraction is 0',
    );
  });
});

describe('createLoader', () => {
  it('takes text through the cache, and the same tokens again', async () => {
    const path = folder.write('text.txt', 'The quick brown fox. '.repeat(40));
    const text: Partial<LoaderOptions> = { source: 'text', path, cacheFolder: folder.path('cache') };
    const first = await using(text, (loader) => take(loader, 5));
    expect(await using(text, (loader) => take(loader, 5))).toEqual(first);
  });

  it('gives each rank of one machine the same view of a corpus built at the same time', async () => {
    const path = folder.write('ranks.txt', 'All ranks read this. '.repeat(40));
    const loaders = await Promise.all(
      [0, 1, 2].map((rank) =>
        createLoader(options({ source: 'text', path, cacheFolder: folder.path('ranks-cache'), world: 3, rank })),
      ),
    );
    expect(new Set(loaders.map((loader) => loader.state().dataset)).size).toBe(1);
    for (const loader of loaders) loader.close();
  });

  it.each<[Partial<LoaderOptions>, string]>([
    [{ seqLen: 0 }, 'train.seq_len: 0 is not allowed'],
    [{ batchSize: 1.5 }, 'train.batch_size: 1.5 is not allowed'],
    [{ seed: -1 }, 'data.seed: -1 is not allowed'],
    [{ rank: 2, world: 2 }, 'rank: 2 is not a whole number from 0 to 1'],
    [{ vocabSize: 1 }, 'data.vocab_size: 1 is not allowed'],
    [{ valFraction: 1 }, 'data.val_fraction: 1 is not allowed'],
    [{ source: 'synthetic' }, 'data.path: not read by data.source synthetic'],
  ])('refuses %j by name', async (change, message) => {
    await expect(createLoader(options(change))).rejects.toThrow(UsageError);
    await expect(createLoader(options(change))).rejects.toThrow(message);
  });

  it('has the defaults of a config, and refuses the names of its keys', async () => {
    const synthetic = await createLoader({});
    expect(synthetic.next().inputs).toHaveLength(2048);
    expect(synthetic.vocabSize).toBe(256);
    synthetic.close();
    await expect(createLoader({ val_fraction: 0 } as object)).rejects.toThrow(
      'val_fraction: unknown option; in a program it is valFraction',
    );
  });

  it('opens a streamed source too, and implies the source of a path', async () => {
    const path = folder.write('implied/a.jsonl', `${JSON.stringify({ text: 'words '.repeat(60) })}\n`);
    const shape = { seqLen: 8, cacheFolder: folder.path('implied-cache') };
    const jsonl = await createLoader({ path, ...shape, valFraction: 0 });
    const streamed = await createLoader({
      source: 'files',
      path,
      ...shape,
      valFraction: 0,
      shuffle: false,
    });
    await streamed.ready!(1);
    expect(jsonl.next().inputs).toHaveLength(8);
    expect([...streamed.next().inputs]).toEqual([...Buffer.from('words wo')]);
    for (const loader of [jsonl, streamed]) loader.close();
  });

  it('refuses to go on when closed', async () => {
    const loader = await createLoader(options());
    loader.close();
    loader.close();
    expect(() => loader.next()).toThrow('the data loader is closed');
    expect(() => [...loader.evalBatches(1)]).toThrow('the data loader is closed');
  });
});
