import { describe, expect, it } from 'vitest';
import { collect, testFolder } from '../testing/folder.js';
import { PIECE_LENGTH, type ReadStatistics } from './document.js';
import { resolveFiles } from './files.js';
import { readTextDocuments } from './text.js';

const folder = testFolder();

async function read(paths: string | string[]) {
  const statistics: ReadStatistics = { bytes: 0, skippedFiles: 0 };
  const documents = await collect(readTextDocuments(await resolveFiles(paths), statistics));
  return { documents, statistics };
}

describe('readTextDocuments', () => {
  it('yields one document per file, in order, byte for byte', async () => {
    folder.write('plain/b.md', '# Title\r\n\n  text  ');
    folder.write('plain/a.txt', '\uFEFFé😀\n');
    folder.write('plain/empty.txt', '');
    const { documents, statistics } = await read(folder.path('plain'));
    expect(documents.map((document) => document.text)).toEqual(['\uFEFFé😀\n', '# Title\r\n\n  text  ']);
    expect(documents.map((document) => document.origin)).toEqual([
      folder.path('plain/a.txt'),
      folder.path('plain/b.md'),
    ]);
    expect(statistics).toEqual({ bytes: 28, skippedFiles: 0 });
  });

  it('skips binary files and counts them', async () => {
    folder.write('binary/a.bin', Buffer.from([1, 2, 0, 3]));
    folder.write('binary/b.dat', Buffer.from(Array.from({ length: 200 }, (_, index) => 128 + (index % 100))));
    folder.write('binary/c.txt', Buffer.from('utf-16 has NUL bytes', 'utf16le'));
    folder.write('binary/d.txt', 'text');
    const { documents, statistics } = await read(folder.path('binary'));
    expect(documents.map((document) => document.text)).toEqual(['text']);
    expect(statistics.skippedFiles).toBe(3);
    expect(statistics.firstSkipped).toBe(folder.path('binary/a.bin'));
  });

  it.each([
    ['a short text', Buffer.from([0x61, 0xff, 0x62]), 'a\uFFFDb'],
    ['invalid bytes only', Buffer.from([0xff, 0xfe]), '\uFFFD\uFFFD'],
    ['an 8-bit encoding', Buffer.from('garçon, où est le café ?', 'latin1'), 'gar\uFFFDon, o\uFFFD est le caf\uFFFD ?'],
  ])('replaces invalid bytes of %s', async (name, bytes, text) => {
    expect((await read(folder.write(`invalid/${name}.txt`, bytes))).documents.map((one) => one.text)).toEqual([text]);
  });

  it('keeps a file with a stray invalid byte', async () => {
    const path = folder.write('stray.log', Buffer.concat([Buffer.from('x'.repeat(500)), Buffer.from([0xff])]));
    expect((await read(path)).documents[0].text).toBe(`${'x'.repeat(500)}\uFFFD`);
  });

  it('is not misled by a character across the end of the inspected part', async () => {
    const path = folder.write('edge.txt', `x${'界'.repeat(30_000)}`);
    expect((await read(path)).documents[0].text).toBe(`x${'界'.repeat(30_000)}`);
  });

  it('hands a large file over in pieces that continue each other', async () => {
    const text = Array.from({ length: 400_000 }, (_, line) => `line ${line} 界😀`).join('\n');
    const { documents } = await read(folder.write('large.txt', text));
    expect(documents.length).toBeGreaterThan(4);
    expect(documents.map((document) => document.text).join('')).toBe(text);
    expect(documents.map((document) => document.continues)).toEqual(documents.map((_, index) => index > 0));
    expect(Math.max(...documents.map((document) => document.text.length))).toBeLessThanOrEqual(PIECE_LENGTH);
  });
});
