import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { type Fault, type HubServer, startHub } from '../../hub/testing/hub-server.js';
import { openCorpus } from '../sources/corpus.js';
import type { CorpusSpec } from '../sources/spec.js';
import { DATASET, hubOptions, numberedDocuments, plainLanes, plainSample, rowsOf } from '../testing/corpora.js';
import { testFolder } from '../testing/folder.js';
import { parquetFile } from '../testing/parquet.js';
import { mergeStreamStates, type StreamState } from './position.js';
import { StreamLoader, type StreamLoaderOptions } from './stream-loader.js';

const long = process.env['TREFOIL_LONG'] === '1';
const folder = testFolder();
const S = 48;

/** Several shards with all that a web corpus has: both codecs, nested columns, empty, missing, huge, broken texts. */
function shards(): Map<string, Uint8Array> {
  const huge = 'a very long document. '.repeat(240_000); // 5 MB
  const broken = Uint8Array.of(0x61, 0xff, 0xfe, 0x62, 0xc3);
  return new Map([
    ['data/one/000.parquet', parquetFile({ documents: numberedDocuments(95, 'a'), rowsPerGroup: 10 })],
    [
      'data/one/001.parquet',
      parquetFile({ documents: ['', null, broken, ...numberedDocuments(40, 'b')], codec: 'ZSTD' }),
    ],
    [
      'data/two/000.parquet',
      parquetFile({ documents: numberedDocuments(61, 'c'), codec: 'UNCOMPRESSED', rowsPerGroup: 7 }),
    ],
    ['data/two/001.parquet', parquetFile({ documents: ['short', huge, 'ümlaut 天地', ''], rowsPerGroup: 2 })],
    ['data/two/notes.txt', Buffer.from('not Parquet')],
  ]);
}

function options(spec: CorpusSpec, overrides: Partial<StreamLoaderOptions> = {}): StreamLoaderOptions {
  return {
    spec,
    tokenizer: 'byte',
    sequenceLength: S,
    batchSize: 2,
    workers: 2,
    documentBatch: 16,
    prefetch: true,
    queue: 3,
    timeout: 60,
    ...overrides,
  };
}

async function take(loader: StreamLoader, batches: number): Promise<Map<number, number[]>> {
  const rows = new Map<number, number[]>();
  for (let batch = 0; batch < batches; batch++) {
    await loader.ready(1);
    for (const [id, row] of rowsOf(loader.next(), S)) rows.set(id, row);
  }
  return rows;
}

function expectPlain(rows: ReadonlyMap<number, number[]>, lanes: readonly number[][], from: number, to: number): void {
  expect([...rows.keys()].sort((a, b) => a - b)).toEqual(Array.from({ length: to - from }, (_, index) => from + index));
  for (const [id, row] of rows) expect(row, `sample ${id}`).toEqual(plainSample(lanes, id, S));
}

describe('a dataset on a hub', () => {
  let hub: HubServer;
  let fault: ((request: { path: string; number: number }) => Fault | undefined) | undefined;
  let spec: CorpusSpec;
  let lanes: number[][];
  beforeAll(async () => {
    const files = shards();
    hub = await startHub({ dataset: DATASET, files, pageSize: 2, fault: (request) => fault?.(request) });
    spec = await openCorpus(hubOptions(hub.endpoint));
    lanes = await plainLanes(spec, 'byte', 6000);
  });
  afterAll(() => hub.close());

  it('gives the stream of a plain reading', async () => {
    expect(spec.lanes).toBeGreaterThan(1);
    const loader = new StreamLoader(options(spec));
    expectPlain(await take(loader, 200), lanes, 0, 400);
    loader.close();
  });

  it('keeps as many batches ready as it says: the queue, or two samples of each lane if those are more', async () => {
    for (const queue of [1, 4, 40]) {
      const loader = new StreamLoader(options(spec, { batchSize: 1, queue }));
      expect(loader.batchesAhead).toBeGreaterThanOrEqual(Math.max(queue, 2 * spec.lanes));
      await loader.ready(1);
      await expect.poll(() => loader.telemetry().queueFill, { timeout: 20_000 }).toBe(loader.batchesAhead);
      loader.close();
    }
    const loader = new StreamLoader(options(spec, { prefetch: false }));
    expect(loader.batchesAhead).toBe(0);
    loader.close();
  });

  it('gives the same without reading ahead, with one worker, with any size of document batches', async () => {
    for (const overrides of [{ prefetch: false }, { workers: 1, documentBatch: 1 }, { queue: 1, workers: 5 }]) {
      const loader = new StreamLoader(options(spec, overrides));
      expectPlain(await take(loader, 40), lanes, 0, 80);
      loader.close();
    }
  });

  it('reads in the order of the files when not shuffled', async () => {
    const plain = await openCorpus(hubOptions(hub.endpoint, { shuffle: false }));
    expect(plain.lanes).toBe(1);
    const loader = new StreamLoader(options(plain));
    const text = Buffer.from([...(await take(loader, 20)).values()].flatMap((row) => row.slice(0, S))).toString();
    loader.close();
    const expected = numberedDocuments(95, 'a')
      .map((document) => `${document}\0`)
      .join('');
    expect(text).toBe(expected.slice(0, text.length));
  });

  it('gives the same stream through drops, 429, 503, truncated, stalled and wrong answers', async () => {
    const kinds: Fault[] = ['drop', '429', '503', 'truncate', 'stall', 'wrong-range'];
    let seed = 11;
    const seen = new Set<Fault>();
    fault = () => {
      seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0;
      if (seed % 100 >= 45) return undefined;
      const kind = kinds[(seed >>> 8) % kinds.length];
      seen.add(kind);
      return kind;
    };
    // A stalled answer is given up soon, so that the test is short.
    const hasty = { ...spec, http: { ...spec.http!, stallMs: 150, firstPauseMs: 10 } };
    const loader = new StreamLoader(options(hasty));
    const batches = long ? 400 : 60;
    try {
      expectPlain(await take(loader, batches), lanes, 0, 2 * batches);
    } finally {
      fault = undefined;
      loader.close();
    }
    expect([...seen].sort()).toEqual([...kinds].sort());
  });

  it('ends with code 6 and a line that says why when the source stays dead', async () => {
    const hasty = { ...spec, http: { ...spec.http!, giveUpAfterMs: 3000, stallMs: 1000, firstPauseMs: 10 } };
    const loader = new StreamLoader(options(hasty));
    await take(loader, 2);
    hub.dead = true;
    try {
      await expect(take(loader, 1000)).rejects.toMatchObject({
        exitCode: 6,
        message: expect.stringMatching(/gave nothing for 3 s.*--loader-timeout/),
      });
      // Batches that were ready are used up before: the position is behind the last batch, not behind what was lost.
      const state = loader.state();
      hub.dead = false;
      const resumed = new StreamLoader(options(spec));
      resumed.restore(JSON.parse(JSON.stringify(state)));
      expectPlain(await take(resumed, 5), lanes, state.sample, state.sample + 10);
      resumed.close();
    } finally {
      hub.dead = false;
      loader.close();
    }
  });

  it('goes on at the next token from any point, with any number of ranks before and after', async () => {
    const points = long ? 50 : 8;
    let state: StreamState | undefined;
    let sample = 0;
    let seed = 5;
    const random = (below: number) => {
      seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0;
      return (seed >>> 8) % below;
    };
    const all = new Map<number, number[]>();
    for (let point = 0; point < points; point++) {
      const world = [1, 2, 3][point % 3];
      const batches = 1 + random(6);
      const states: StreamState[] = [];
      for (let rank = 0; rank < world; rank++) {
        const loader = new StreamLoader(options(spec, { rank, world, workers: 1, batchSize: 1 + (point % 2) }));
        if (state) loader.restore(JSON.parse(JSON.stringify(state)));
        for (const [id, row] of await take(loader, batches)) {
          expect(all.has(id), `sample ${id} twice`).toBe(false);
          all.set(id, row);
        }
        states.push(loader.state());
        loader.close(); // in the middle of its reading ahead
      }
      state = mergeStreamStates(states);
      sample += batches * world * (1 + (point % 2));
      expect(state.sample).toBe(sample);
    }
    expectPlain(all, lanes, 0, sample);
  });

  it('resumes in constant time: what it fetches does not grow with the position', async () => {
    const cost = async (batches: number): Promise<number> => {
      // Without prefetching: what it had asked for and not got when it is closed would count as the other's.
      const first = new StreamLoader(options(spec, { prefetch: false }));
      await take(first, batches);
      const state = first.state();
      first.close();
      const before = hub.bytes;
      const loader = new StreamLoader(options(spec, { prefetch: false }));
      loader.restore(state);
      await take(loader, 1);
      loader.close();
      return hub.bytes - before;
    };
    const early = await cost(1);
    // A footer and a row group for each lane of the batch, wherever it is; the files have a few kilobytes each.
    expect(await cost(150)).toBeLessThan(2 * early);
  });

  it('reads only its own lanes on each rank', async () => {
    const states: number[][] = [];
    for (const rank of [0, 1]) {
      const loader = new StreamLoader(options(spec, { rank, world: 2 }));
      await take(loader, 2);
      states.push(loader.state().lanes.flatMap((cursor, lane) => (cursor === null ? [] : [lane])));
      loader.close();
    }
    expect(states[0].some((lane) => states[1].includes(lane))).toBe(false);
  });

  it('sets documents aside for validation that training never sees', async () => {
    const split = await openCorpus(hubOptions(hub.endpoint, { valFraction: 0.2 }));
    const loader = new StreamLoader(options(split, { documentMask: true }));
    await loader.readyToEvaluate(4);
    const first = [...loader.evalBatches(4)];
    const second = [...loader.evalBatches(4)];
    expect(first.map(({ inputs }) => [...inputs])).toEqual(second.map(({ inputs }) => [...inputs]));
    expect(loader.state().sample).toBe(0);
    const names = (tokens: Iterable<number>) =>
      [
        ...Buffer.from([...tokens])
          .toString()
          .matchAll(/<[abc]\d+>/g),
      ].map(([name]) => name);
    const aside = new Set(first.flatMap(({ inputs }) => names(inputs)));
    expect(aside.size).toBeGreaterThan(1);
    const trained = new Set<string>();
    for (const lane of await plainLanes(split, 'byte', 4000)) for (const name of names(lane)) trained.add(name);
    expect([...aside].filter((name) => trained.has(name))).toEqual([]);
    loader.close();
  });

  it('marks document starts for masks', async () => {
    const loader = new StreamLoader(options(spec, { documentMask: true }));
    let boundaries = 0;
    for (let batch = 0; batch < 40; batch++) {
      await loader.ready(1);
      const { inputs, targets, cuSeqlens } = loader.next();
      for (const start of cuSeqlens.slice(1, -1)) {
        if (start % S === 0) continue;
        boundaries++;
        expect(inputs[start - 1]).toBe(0);
        expect(targets[start - 1]).toBe(-100);
      }
    }
    loader.close();
    expect(boundaries).toBeGreaterThan(0);
  });

  it('refuses a position of other data, other settings, or of too few ranks', async () => {
    const loader = new StreamLoader(options(spec));
    const state = loader.state();
    expect(() => loader.restore({ ...state, dataset: 'x' })).toThrow(/holds other data than this run was trained on/);
    expect(() => loader.restore({ ...state, seq_len: 7 })).toThrow(/seq_len is 48, but was 7/);
    expect(() => loader.restore({ ...state, lanes: state.lanes.map(() => null) })).toThrow(/lanes 0, 1.* are missing/);
    expect(() => loader.restore({ sample: 3 })).toThrow(/data position/);
    loader.close();
  });

  it('fetches only the text column, and nothing twice with a cache', async () => {
    const cached = { cache: { folder: folder.fresh(), limitBytes: 1 << 28 } };
    const withCache = await openCorpus(hubOptions(hub.endpoint, cached));
    const run = async () => {
      const before = hub.requests.length;
      const loader = new StreamLoader(options(withCache));
      await take(loader, 60);
      loader.close();
      return hub.requests.length - before;
    };
    expect(await run()).toBeGreaterThan(0);
    // The next loader fetches the files that the closed one was fetching ahead; then all are cached.
    await expect.poll(run).toBe(0);
  });
});
