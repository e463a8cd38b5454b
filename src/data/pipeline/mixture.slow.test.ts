/** Batches of mixtures: the same for every rank count, with reading ahead or without, after a restart, a crash, other weights. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { afterAll, describe, expect, it } from 'vitest';
import { parseConfig } from '../../config/parse.js';
import fc from '../../testing/properties.js';
import type { Batch } from '../batch.js';
import { openLoader } from '../loader.js';
import { testFolder } from '../testing/folder.js';
import { writeShards } from '../testing/shards.js';
import { AheadLoader } from './ahead-loader.js';

const folder = testFolder();
const SEQ_LEN = 8;

/** Sources of different sizes, each with bytes of its own, so that a batch shows where its rows come from. */
const SIZES = [40, 333, 1200, 90];
const BYTES_PER_SOURCE = 60;
const shards = SIZES.map((size, source) => {
  const path = folder.path(`source-${source}`);
  const ids = Array.from({ length: size }, (_, i) => 1 + source * BYTES_PER_SOURCE + (i % BYTES_PER_SOURCE));
  writeShards(path, [ids.slice(0, size / 2), ids.slice(size / 2)]);
  return path;
});

const NAMES = ['web', 'code', 'books', 'chats'];
interface Case {
  readonly weights: readonly number[];
  readonly seed: number;
  readonly rows: number;
  readonly prefetch: boolean;
  readonly epochs?: number;
}

const configOf = ({ weights, seed, rows, prefetch, epochs = 1_000_000 }: Case) => {
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  const sources = weights.map((weight, i) => ({
    name: NAMES[i],
    source: 'tokens' as const,
    path: shards[i],
    weight: weight / total,
    epochs,
  }));
  return parseConfig({
    data: { sources, val_fraction: 0, prefetch },
    train: { seq_len: SEQ_LEN, batch_size: rows, seed },
  });
};

const open = async (given: Case, rank = 0, world = 1) => {
  const loader = await openLoader(configOf(given), { rank, world, cacheFolder: folder.path('cache') });
  return given.prefetch ? new AheadLoader(loader) : loader;
};

/** Row by row, as texts. */
const rowsOf = ({ inputs, targets, sampleIds }: Batch): string[] =>
  sampleIds.map(
    (id, row) =>
      `${id}: ${inputs.slice(row * SEQ_LEN, (row + 1) * SEQ_LEN)} > ${targets.slice(row * SEQ_LEN, (row + 1) * SEQ_LEN)}`,
  );

/** The rows of `batches` steps of all ranks in the order of the run; each rank restarts after `restart` steps. */
async function rowsOfRun(given: Case, world: number, batches: number, restart = -1): Promise<string[]> {
  const byRank: string[][][] = [];
  for (let rank = 0; rank < world; rank++) {
    let loader = await open(given, rank, world);
    const taken: string[][] = [];
    for (let step = 0; step < batches; step++) {
      // Batches that were looked at before a restart must come again.
      if (given.prefetch) loader.lookAhead?.(2);
      if (step === restart) {
        const state = JSON.parse(JSON.stringify(loader.state()));
        loader.close();
        loader = await open(given, rank, world);
        loader.restore(state);
      }
      taken.push(rowsOf(loader.next()));
    }
    loader.close();
    byRank.push(taken);
  }
  return Array.from({ length: batches }, (_, step) => byRank.flatMap((taken) => taken[step])).flat();
}

const cases = fc.record({
  weights: fc.array(fc.integer({ min: 1, max: 50 }), { minLength: 1, maxLength: NAMES.length }),
  seed: fc.integer({ min: 0, max: 1e6 }),
});

describe('batches of a mixture', () => {
  it('are the same for 1 to 4 ranks, with prefetching or without, from any restart', async () => {
    await fc.assert(
      fc.asyncProperty(cases, fc.integer({ min: 0, max: 11 }), async (given, restart) => {
        // 12 rows a step, whatever the number of ranks.
        const expected = await rowsOfRun({ ...given, rows: 12, prefetch: false }, 1, 12);
        for (const world of [1, 2, 3, 4])
          for (const prefetch of [false, true]) {
            const rows = await rowsOfRun({ ...given, rows: 12 / world, prefetch }, world, 12, restart);
            expect(rows).toEqual(expected);
          }
      }),
      { numRuns: 12 },
    );
  });

  it('hold the tokens of their sources in the shares of the weights, each sample of an epoch once', async () => {
    const given = { weights: [0.03, 0.37, 0.6], seed: 3, rows: 10, prefetch: false };
    const loader = await open(given);
    const counts = [0, 0, 0];
    const perSource: number[][] = [[], [], []];
    for (let step = 0; step < 1000; step++) {
      const { inputs, sampleIds } = loader.next();
      for (const token of inputs) if (token > 0) counts[Math.floor((token - 1) / BYTES_PER_SOURCE)]++;
      // By name: books 0, code 1, web 2.
      for (const id of sampleIds) perSource[[2, 1, 0][id % 3]].push(Math.floor(id / 3));
    }
    const total = counts.reduce((sum, count) => sum + count, 0);
    for (const [source, weight] of given.weights.entries())
      expect(Math.abs(counts[source] / total - weight)).toBeLessThan(0.005);
    for (const [source, ids] of perSource.entries()) {
      const perEpoch = Math.floor((SIZES[source] + 2) / SEQ_LEN);
      const whole = ids.slice(0, Math.floor(ids.length / perEpoch) * perEpoch);
      expect([...whole].sort((a, b) => a - b)).toEqual(whole.map((_, i) => i));
    }
    expect(
      loader.sources!().map(({ name, tokens }) => [name, Math.abs(tokens - counts[NAMES.indexOf(name)]) < 2000]),
    ).toEqual([
      ['books', true],
      ['code', true],
      ['web', true],
    ]);
    loader.close();
  });

  it('do not depend on the order of the list', async () => {
    const given = { weights: [1, 2, 3], seed: 4, rows: 4, prefetch: false };
    const config = configOf(given);
    const turned = { ...config, data: { ...config.data, sources: [...config.data.sources!].reverse() } };
    const loader = await openLoader(turned);
    expect(Array.from({ length: 6 }, () => rowsOf(loader.next())).flat()).toEqual(await rowsOfRun(given, 1, 6));
    loader.close();
  });
});

describe('a source that ends', () => {
  it('stops the run by its name, on all ranks at the same batch', async () => {
    const given = { weights: [0.5, 0, 0.5].filter(Boolean), seed: 1, rows: 1, prefetch: false, epochs: 2 };
    // web has 42 tokens: 5 samples an epoch, 10 in two.
    const ends: number[] = [];
    for (const rank of [0, 1]) {
      const loader = await open(given, rank, 2);
      let step = 0;
      expect(() => {
        for (; step < 100; step++) loader.next();
      }).toThrow('data.sources: web has ended after 2 epochs; add data to it, raise its epochs, or train fewer steps');
      const before = loader.state();
      expect(() => loader.next()).toThrow('web has ended');
      expect(loader.state()).toEqual(before);
      ends.push(step);
      loader.close();
    }
    expect(ends[0]).toBe(ends[1]);
    expect(Math.abs(2 * ends[0] * 0.5 - 10)).toBeLessThanOrEqual(3);
  });
});

describe('resuming a mixture', () => {
  const given = { weights: [0.2, 0.3, 0.5], seed: 9, rows: 4, prefetch: false };
  const saved = async () => {
    const loader = await open(given);
    for (let step = 0; step < 20; step++) loader.next();
    const state = JSON.parse(JSON.stringify(loader.state()));
    loader.close();
    return state;
  };

  it('with other weights goes on in every source where it was', async () => {
    const state = await saved();
    const changed = { ...given, weights: [0.6, 0.3, 0.1] };
    const loader = await open(changed);
    loader.restore(state);
    const ids: number[][] = [[], [], []];
    for (let step = 0; step < 30; step++)
      for (const id of loader.next().sampleIds) ids[id % 3].push(Math.floor(id / 3));
    const position = loader.state() as typeof state;
    loader.close();
    for (const [part, { name, taken }] of state.sources.entries()) {
      const now = position.sources[part];
      expect([now.name, now.taken - taken]).toEqual([name, ids[part].length]);
    }
    const share = (part: number) => ids[part].length / 120;
    expect([share(0), share(1), share(2)].map((value) => Math.round(10 * value))).toEqual([1, 3, 6]);
    // Saved and restored again, the order is the same as without.
    const again = await open(changed);
    again.restore(position);
    const once = await open(changed);
    once.restore(state);
    for (let step = 0; step < 30; step++) once.next();
    expect(rowsOf(again.next())).toEqual(rowsOf(once.next()));
    again.close();
    once.close();
  });

  it('refuses a missing source and other data by the name of the source', async () => {
    const state = await saved();
    const fewer = await open({ ...given, weights: [0.2, 0.8] });
    expect(() => fewer.restore(state)).toThrow(
      /^data.sources: books is missing, from which this run has taken \d+ samples/,
    );
    fewer.close();
    const other = await open(given);
    const damaged = { ...state, sources: state.sources.map((one: object) => ({ ...one, dataset: 'other' })) };
    expect(() => other.restore(damaged)).toThrow(
      /^data.sources: books \(.*\) holds other data than this run was trained on/,
    );
    other.close();
  });

  it('is the same after kill -9 at any moment', async () => {
    const script = fileURLToPath(new URL('../testing/mixture-run.ts', import.meta.url));
    const runner = fileURLToPath(new URL('../../../node_modules/vite-node/vite-node.mjs', import.meta.url));
    const config = folder.write('killed.json', JSON.stringify(configOf(given)));
    const positions = folder.path('positions');
    const batches = folder.path('batches');
    let child: ChildProcess | undefined;
    afterAll(() => child?.kill('SIGKILL'));
    const savedStep = (): number => JSON.parse(readFileSync(positions, 'utf8')).step;
    for (const kill of [37, 61, Number.POSITIVE_INFINITY]) {
      // A process that is to be killed would never end by itself.
      const steps = Number.isFinite(kill) ? 1e9 : savedStep() + 10;
      child = spawn(process.execPath, [runner, script, config, positions, batches, String(steps)], {
        stdio: ['ignore', 'pipe', 'inherit'],
      });
      let lines = 0;
      child.stdout!.on('data', (data) => {
        lines += String(data).split('\n').length - 1;
        if (lines >= kill) child?.kill('SIGKILL');
      });
      const [code, signal] = await once(child, 'exit');
      expect(kill === Number.POSITIVE_INFINITY ? code : signal).toBe(kill === Number.POSITIVE_INFINITY ? 0 : 'SIGKILL');
    }
    const last = savedStep();
    expect(last).toBeGreaterThan(37 + 61);
    const loader = await open(given);
    const expected = Array.from({ length: last + 1000 }, () => rowsOf(loader.next()).join(';'));
    loader.close();
    // A step that was taken twice, before and after a kill, has the same batch both times.
    const seen = readFileSync(batches, 'utf8').split('\n');
    const whole = seen.filter((line) => line.endsWith('!'));
    const taken = new Set(whole.map((line) => Number.parseInt(line, 10)));
    for (let step = 0; step < last; step++) expect(taken.has(step), `step ${step}`).toBe(true);
    for (const line of whole) {
      const step = Number.parseInt(line, 10);
      expect(line).toBe(`${step} ${expected[step]}!`);
    }
  });
});
