import { execFileSync } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import fc from '../../testing/properties.js';
import { openCorpus } from '../sources/corpus.js';
import { hubOptions, numberedDocuments } from '../testing/corpora.js';
import { testFolder } from '../testing/folder.js';
import { parquetFile } from '../testing/parquet.js';
import { groupBorders, groupsOfPart } from './groups.js';
import { joinParts } from './join.js';
import { readPartManifest, writePartManifest } from './part-manifest.js';
import { prepareCorpus } from './prepare.js';
import { ShardReader } from './reader.js';

const folder = testFolder();
const plain = { ...hubOptions(''), environment: {}, source: 'files' as const, shuffle: false };
const documents = numberedDocuments(600, 'j');
const jsonl = (some: readonly string[]) => some.map((text) => `${JSON.stringify({ text })}\n`).join('');
folder.write('corpus/a.jsonl', jsonl(documents.slice(0, 300)));
folder.write('corpus/b.parquet', parquetFile({ documents: documents.slice(300, 400) }));
folder.write('corpus/c.txt', documents.slice(400, 500).join('\n'));
folder.write('corpus/d.bin.txt', Uint8Array.of(0, 1, 2, 0));
folder.write('corpus/e.jsonl', jsonl(documents.slice(500)));

const GROUP = 4000;
const open = (partBytes: number, path = folder.path('corpus')) =>
  openCorpus({ ...plain, path, partBytes, groupBytes: GROUP });
const prepare = async (out: string, part?: { index: number; count: number }, partBytes = 1500) =>
  prepareCorpus({
    spec: await open(partBytes),
    tokenizerName: 'byte',
    folder: out,
    workers: 1,
    groupBytes: GROUP,
    part,
  });

/** The files of a folder with their bytes. */
const filesOf = (path: string) =>
  Object.fromEntries(readdirSync(path).map((name) => [name, readFileSync(join(path, name)).toString('base64')]));

const whole = folder.path('whole');
let expected: Record<string, string>;

describe('parts of a corpus', () => {
  it('make the shards of one process, however many they are, in any order, whatever the size of units', async () => {
    const { index } = await prepare(whole);
    expect(index.shards.length).toBeGreaterThan(5);
    expected = filesOf(whole);
    for (const [count, partBytes] of [
      [3, 1500],
      [8, 700],
      [20, 9000],
    ]) {
      const out = folder.path(`joined-${count}`);
      const order = Array.from({ length: count }, (_, i) => i + 1).reverse();
      for (const part of order) await prepare(out, { index: part, count }, partBytes);
      expect(joinParts(out).checksum).toBe(index.checksum);
      expect(filesOf(out)).toEqual(expected);
    }
    // The reader finds every document, in every group.
    const reader = ShardReader.open(whole);
    const starts = [...reader.documentStarts];
    const text = Buffer.from(reader.readTokens(0, reader.index.tokens)).toString('latin1').split('\0');
    expect(starts.length).toBe(text.length - 1);
    let at = 0;
    for (const [i, start] of starts.entries()) {
      expect(start).toBe(at);
      at += text[i].length + 1;
    }
    reader.close();
  }, 120_000);

  it('are the shards of a version without groups where the corpus is one group', async () => {
    const spec = await openCorpus({ ...plain, path: folder.path('corpus'), partBytes: 3000 });
    const { index } = await prepareCorpus({ spec, tokenizerName: 'byte', folder: folder.path('one'), workers: 1 });
    expect(index.shards.map(({ base }) => base)).toEqual([undefined]);
  });

  it('cover all groups once, each group of the wanted size', async () => {
    const spec = await open(1500);
    const borders = groupBorders(spec, GROUP);
    expect([borders[0], borders.at(-1)]).toEqual([0, spec.files.reduce((sum, { parts }) => sum + parts, 0)]);
    for (const border of borders) expect(Number.isInteger(border)).toBe(true);
    fc.assert(
      fc.property(fc.integer({ min: 1, max: 40 }), fc.integer({ min: 1, max: 60 }), (groups, count) => {
        let end = 0;
        for (let index = 1; index <= count; index++) {
          const [first, after] = groupsOfPart(groups, { index, count });
          expect(first).toBe(end);
          end = after;
        }
        expect(end).toBe(groups);
      }),
    );
  });
});

describe('an interrupted part', () => {
  it('is repeated from its finished units; a finished one is left alone', async () => {
    const out = folder.path('repeated');
    const notes: string[] = [];
    const options = { tokenizerName: 'byte', folder: out, workers: 1, groupBytes: GROUP, part: { index: 2, count: 2 } };
    // A unit that cannot be read stops the part.
    const path = folder.path('corpus/e.jsonl');
    const content = readFileSync(path);
    const spec = await open(700);
    writeFileSync(path, Buffer.concat([content.subarray(0, -3), Buffer.from('xx\n')]));
    await expect(prepareCorpus({ ...options, spec })).rejects.toThrow(/e\.jsonl:100: not valid JSON/);
    writeFileSync(path, content);
    const again = await open(700);
    await prepareCorpus({ ...options, spec: again, onNote: (line) => notes.push(line) });
    await prepareCorpus({ ...options, spec: again, onNote: (line) => notes.push(line) });
    expect(notes).toEqual([
      expect.stringMatching(/^[1-9]\d* of \d+ units are done already$/),
      'part 2 of 2 is done already',
    ]);
    await prepare(out, { index: 1, count: 2 });
    expect(joinParts(out).checksum).toBe(JSON.parse(readFileSync(join(whole, 'index.json'), 'utf8')).checksum);
  });
});

describe('joining', () => {
  const parts = async (name: string, some = [1, 2, 3]) => {
    const out = folder.path(name);
    for (const index of some) await prepare(out, { index, count: 3 });
    return out;
  };

  it('names missing parts, parts of another corpus, and a folder without any', async () => {
    const out = await parts('missing', [2]);
    expect(() => joinParts(out)).toThrow(/part 1, 3 of 3 are missing; run trefoil data prepare --part 1\/3 again/);
    expect(() => joinParts(folder.path('corpus'))).toThrow(
      /holds no parts; make them with trefoil data prepare --part/,
    );
    const other = await openCorpus({ ...plain, path: folder.path('corpus/a.jsonl'), groupBytes: GROUP });
    const mixed = { spec: other, tokenizerName: 'byte', folder: out, workers: 1, groupBytes: GROUP };
    await prepareCorpus({ ...mixed, part: { index: 1, count: 3 } });
    await prepareCorpus({ ...mixed, part: { index: 3, count: 3 } });
    expect(() => joinParts(out)).toThrow(/is of another corpus, tokenizer or division than part 1 of 3/);
    await expect(prepareCorpus({ ...mixed, part: { index: 2, count: 3 } })).rejects.toThrow(/parts of another corpus/);
  });

  it('refuses parts that claim too much, or twice the same', async () => {
    const out = await parts('claims', [1]);
    const place = join(out, 'part-1-of-3');
    const sound = readPartManifest(place);
    const rewrite = (at: string, change: Partial<typeof sound>) => {
      rmSync(join(at, 'part.json'), { force: true });
      writePartManifest(at, { ...sound, ...change });
    };
    rewrite(place, { parts: Number.MAX_SAFE_INTEGER });
    expect(() => joinParts(out)).toThrow(
      /part 2, 3, 4, 5, 6, 7, 8, 9 and others of 9007199254740991 are missing; run trefoil data prepare --part 2\//,
    );
    rewrite(place, { parts: 1 });
    mkdirSync(join(out, 'part-01-of-1'));
    rewrite(join(out, 'part-01-of-1'), { parts: 1 });
    expect(() => joinParts(out)).toThrow('2 folders say that they are the 1 parts; remove those that are there twice');
    rmSync(join(out, 'part-01-of-1'), { recursive: true });
    expect(() => rewrite(place, { shards: [sound.shards[0], sound.shards[0]] })).toThrow('a file is listed twice');
    rmSync(join(place, 'part.json'), { force: true });
    execFileSync('mkfifo', [join(place, 'part.json')]);
    expect(() => joinParts(out)).toThrow(/part\.json: is not a regular file.*; remove its folder and prepare the part/);
  });

  it('names a damaged file before anything moves', async () => {
    const out = await parts('flipped');
    const place = join(out, 'part-2-of-3');
    const name = readdirSync(place).find((one) => one.startsWith('tokens'))!;
    const bytes = readFileSync(join(place, name));
    bytes[9] ^= 1;
    writeFileSync(join(place, name), bytes);
    expect(() => joinParts(out)).toThrow(/part-2-of-3\/tokens-00000\.bin: damaged \(its SHA-256 does not match/);
    expect(readdirSync(out).sort()).toEqual(['part-1-of-3', 'part-2-of-3', 'part-3-of-3']);
    writeFileSync(join(place, 'part.json'), '{}');
    expect(() => joinParts(out)).toThrow(/part\.json: damaged/);
  });

  it('goes on after an interruption at any move, and refuses a second time', async () => {
    for (const moved of [1, 2, 3, 4]) {
      const out = await parts(`moved-${moved}`);
      // The first files have their names already.
      const names = readdirSync(join(out, 'part-1-of-3')).filter((name) => name.endsWith('.bin'));
      for (const name of names.slice(0, moved)) renameSync(join(out, 'part-1-of-3', name), join(out, name));
      joinParts(out);
      expect(filesOf(out)).toEqual(expected);
      expect(() => joinParts(out)).toThrow(/is joined already; train from it/);
      // As after a kill while the folders of the parts are removed.
      mkdirSync(join(out, 'part-2-of-3'));
      joinParts(out);
      expect(existsSync(join(out, 'part-2-of-3'))).toBe(false);
      await expect(prepare(out, { index: 1, count: 3 })).rejects.toThrow(/holds joined shards/);
    }
  });
});
