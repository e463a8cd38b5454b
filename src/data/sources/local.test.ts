import { spawnSync } from 'node:child_process';
import { gzipSync } from 'node:zlib';
import type { FileMetaData, PageHeader } from 'hyparquet';
import { parquetWriteBuffer } from 'hyparquet-writer';
import { describe, expect, it } from 'vitest';
import { TrefoilError } from '../../errors.js';
import { StreamLoader } from '../pipeline/stream-loader.js';
import { hubOptions, numberedDocuments, plainLanes, plainSample, rowsOf } from '../testing/corpora.js';
import { testFolder } from '../testing/folder.js';
import { parquetFile, withFooter, withPage } from '../testing/parquet.js';
import { BlobOpener } from './blob.js';
import { openCorpus } from './corpus.js';
import { LaneDocuments } from './documents.js';
import { CorpusOrder, countUnits } from './order.js';
import { documentText } from './reader.js';
import type { CorpusSpec } from './spec.js';

const folder = testFolder();
const local = (path: string, overrides: object = {}) =>
  openCorpus({ ...hubOptions(''), environment: {}, source: 'files', path, ...overrides });
const jsonl = (documents: readonly string[]) =>
  documents.map((text) => `${JSON.stringify({ text, id: 1 })}\n`).join('');

/** Every document of the first epoch, in any order. */
async function firstEpoch(spec: CorpusSpec): Promise<string[]> {
  const order = new CorpusOrder(spec);
  const texts: string[] = [];
  for (let lane = 0; lane < spec.lanes; lane++) {
    const documents = new LaneDocuments(order, lane, { side: 'all', opener: new BlobOpener(spec) });
    try {
      for (let placed = await documents.next(); placed && placed.epoch === 0; placed = await documents.next())
        texts.push(documentText(placed.document));
    } finally {
      await documents.close();
    }
  }
  return texts;
}

describe('a folder of files', () => {
  it('gives the documents of every format, each once an epoch, and the plain stream', async () => {
    const root = folder.fresh().slice(folder.root.length + 1);
    const documents = (tag: string, count = 40) => numberedDocuments(count, tag);
    folder.write(`${root}/a.parquet`, parquetFile({ documents: documents('p') }));
    folder.write(`${root}/deep/b.jsonl`, jsonl(documents('j')));
    folder.write(`${root}/c.jsonl.gz`, gzipSync(jsonl(documents('g'))));
    folder.write(`${root}/note.txt`, 'a note\nof two lines');
    folder.write(`${root}/empty.txt`, '');
    folder.write(`${root}/picture.png`, Uint8Array.of(1, 2, 3));
    const expected = [...documents('p'), ...documents('j'), ...documents('g'), 'a note\nof two lines'];
    const packed = spawnSync('zstd', ['-q', '-c'], { input: jsonl(documents('z')) });
    if (packed.status === 0) {
      folder.write(`${root}/d.jsonl.zst`, packed.stdout);
      expected.push(...documents('z'));
    }
    const spec = await local(folder.path(root));
    expect((await firstEpoch(spec)).sort()).toEqual(expected.sort());

    const lanes = await plainLanes(spec, 'byte', 3000);
    const loader = new StreamLoader({
      spec,
      tokenizer: 'byte',
      sequenceLength: 32,
      batchSize: 3,
      workers: 1,
      documentBatch: 4,
      prefetch: true,
      queue: 2,
      timeout: 60,
    });
    let state: object | undefined;
    for (let batch = 0; batch < 30; batch++) {
      if (batch === 17) {
        state = loader.state();
        loader.restore(JSON.parse(JSON.stringify(state)));
      }
      await loader.ready(1);
      for (const [id, row] of rowsOf(loader.next(), 32)) expect(row).toEqual(plainSample(lanes, id, 32));
    }
    loader.close();
  });

  it('cuts a large file of lines into parts that hold every line once', async () => {
    const documents = Array.from({ length: 3000 }, (_, index) => `${index} ${'x'.repeat((index * 37) % 3000)}`);
    const path = folder.write('large.jsonl', jsonl(documents).slice(0, -1)); // without the last line end
    const spec = await local(path);
    expect(countUnits(spec.files)).toBeGreaterThan(2);
    expect((await firstEpoch(spec)).sort()).toEqual([...documents].sort());
  });

  it('finds text in a struct, and says which columns there are when it is not there', async () => {
    const texts = numberedDocuments(12, 'n');
    const path = folder.write('nested.parquet', parquetFile({ documents: texts, textField: 'meta.body' }));
    expect((await firstEpoch(await local(path, { textField: 'meta.body' }))).sort()).toEqual([...texts].sort());
    await expect(local(path, { textField: 'text' })).rejects.toThrow(
      /no column "text" \(columns: id, meta\); set data.text_field/,
    );
    await expect(local(path, { textField: 'meta' })).rejects.toThrow(/column "meta" holds no text/);
    await expect(local(path, { textField: 'meta.score' })).rejects.toThrow(/holds no text/);
  });

  it.each<[string, string, (metadata: FileMetaData) => void]>([
    [
      '100 million rows in a group',
      'claims 100000000 rows',
      ({ row_groups: [group] }) => (group.num_rows = 100_000_000n),
    ],
    ['-5 rows in a group', 'claims -5 rows', ({ row_groups: [group] }) => (group.num_rows = -5n)],
    [
      'columns in 20,000 levels',
      'schema is not readable as Parquet',
      (metadata) => {
        for (const { columns } of metadata.row_groups)
          for (const { meta_data } of columns) delete meta_data!.statistics;
        const level = { name: 'a', num_children: 1, repetition_type: 'OPTIONAL' } as const;
        metadata.schema.splice(1, 0, ...Array<typeof level>(20_000).fill(level));
      },
    ],
  ])('Parquet that claims %s is refused by name', async (_, message, change) => {
    const path = folder.write('forged.parquet', withFooter(parquetFile({ documents: ['a', 'b'] }), change));
    const error = await local(path).catch((refusal: unknown) => refusal);
    expect(error).toBeInstanceOf(TrefoilError);
    expect((error as Error).message).toContain(`forged.parquet: `);
    expect((error as Error).message).toContain(message);
  });

  it('Parquet whose rows repeat a long text is refused before it is tokenised', async () => {
    const text = Buffer.alloc(2 ** 20, 'a');
    const column = { name: 'text', data: Array(5000).fill(text), type: 'BYTE_ARRAY' } as const;
    const options = { statistics: false, codec: 'UNCOMPRESSED', rowGroupSize: 5000 } as const;
    const bytes = new Uint8Array(parquetWriteBuffer({ columnData: [column], ...options }));
    expect(bytes.length).toBeLessThan(2 * text.length); // one entry of a dictionary
    const corpus = await local(folder.write('repeated.parquet', bytes));
    await expect(firstEpoch(corpus)).rejects.toThrow(
      /repeated\.parquet: row group 0 has 5242880000 bytes of text, the limit is 4294967296/,
    );
  });

  it.each<[string, string, (page: PageHeader) => void]>([
    [
      '2 billion values',
      'claims 2000000000 values, the limit is 33554432; write it with smaller',
      (page) => (page.data_page_header_v2!.num_values = 2e9),
    ],
    ['2 GB', 'has a page of 2000000000 bytes', (page) => (page.uncompressed_page_size = 2e9)],
    ['-1 bytes', 'a page of negative size', (page) => (page.compressed_page_size = -1)],
  ])('a page of Parquet that claims %s is refused before memory is taken', async (_, message, change) => {
    const sound = parquetFile({ documents: ['a', 'b'] });
    const padding = new Uint8Array(64).fill(0xff); // no page
    const untouched = folder.write(
      'sound.parquet',
      withPage(sound, () => {}, padding),
    );
    expect((await firstEpoch(await local(untouched))).sort()).toEqual(['a', 'b']);
    const forged = folder.write('forged.parquet', withPage(sound, change));
    const error = await local(forged)
      .then(firstEpoch)
      .catch((refusal: unknown) => refusal);
    expect(error).toBeInstanceOf(TrefoilError);
    expect((error as Error).message).toContain('forged.parquet: row group 0 ');
    expect((error as Error).message).toContain(message);
  });

  it.each([
    ['no documents at all', [], /no documents to train on|not readable|empty/],
    ['empty documents only', ['', '', null], /only empty documents/],
  ])('with %s is refused instead of searched for ever', async (_, documents, message) => {
    const path = folder.write('hollow.parquet', parquetFile({ documents: documents as string[] }));
    const loader = new StreamLoader({
      spec: await local(path),
      tokenizer: 'byte',
      sequenceLength: 8,
      batchSize: 1,
      workers: 1,
      documentBatch: 4,
      prefetch: true,
      queue: 2,
      timeout: 60,
    });
    await expect(loader.ready(1)).rejects.toThrow(message);
    loader.close();
  });

  it('with everything set aside for validation is refused', async () => {
    const path = folder.write('few.jsonl', jsonl(['one document']));
    const spec = await local(path, { valFraction: 0.999999 });
    const documents = new LaneDocuments(new CorpusOrder(spec), 0, { side: 'train' });
    await expect(documents.next()).rejects.toThrow(/lower data.val_fraction/);
  });

  it('that is damaged or cut short ends with a line that names the file', async () => {
    const bytes = parquetFile({ documents: numberedDocuments(30, 'd') });
    await expect(local(folder.write('cut.parquet', bytes.slice(0, 100)))).rejects.toMatchObject({
      exitCode: 6,
      message: expect.stringMatching(/cut\.parquet: footer is not readable as Parquet/),
    });
    bytes.fill(0xff, 10, 200);
    const spec = await local(folder.write('bad.parquet', bytes));
    const documents = new LaneDocuments(new CorpusOrder({ ...spec, shuffle: false, lanes: 1 }), 0, { side: 'all' });
    await expect(documents.next()).rejects.toThrow(/bad\.parquet: row group 0 is not readable as Parquet/);
  });

  it('does not depend on where it lies', async () => {
    const identities = [];
    for (const root of ['here', 'there/deeper']) {
      folder.write(`${root}/x/a.jsonl`, jsonl(['one', 'two']));
      identities.push((await local(folder.path(root))).files.map(({ name, identity }) => [name, identity]));
    }
    expect(identities[0]).toEqual(identities[1]);
  });
});
