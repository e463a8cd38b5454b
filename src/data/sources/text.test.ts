import { gzipSync } from 'node:zlib';
import { describe, expect, it } from 'vitest';
import fc from '../../testing/properties.js';
import { testFolder } from '../testing/folder.js';
import { createGpt2Tokenizer } from '../tokenizers/gpt2.js';
import { BlobOpener } from './blob.js';
import type { DocumentBlock } from './reader.js';
import { cutText, openText, PIECE_LENGTH } from './text.js';

const folder = testFolder();

async function read(path: string, blockLength?: number): Promise<DocumentBlock[]> {
  const file = { kind: 'text', name: path, location: path, size: 1, identity: '', parts: 1 } as const;
  const reader = await openText({ file, part: 0, textField: '', opener: new BlobOpener({}) }, blockLength);
  const blocks: DocumentBlock[] = [];
  for (let block = await reader.read(0); block !== undefined; block = await reader.read(block.next)) blocks.push(block);
  await reader.close();
  return blocks;
}
const textOf = async (path: string) => (await read(path)).flatMap(({ documents }) => documents);

describe('openText', () => {
  it('reads a file as one document, byte for byte, also compressed', async () => {
    const text = '\uFEFFé😀\n# Title\r\n\n  text  ';
    expect(await textOf(folder.write('a.txt', text))).toEqual([text]);
    expect(await textOf(folder.write('a.txt.gz', gzipSync(text)))).toEqual([text]);
  });

  it('skips binary files', async () => {
    for (const bytes of [
      Buffer.from([1, 2, 0, 3]),
      Buffer.from(Array.from({ length: 200 }, (_, index) => 128 + (index % 100))),
      Buffer.from('utf-16 has NUL bytes', 'utf16le'),
    ])
      expect(await read(folder.write('binary', bytes))).toEqual([{ documents: [], next: 1, skipped: 'binary' }]);
  });

  it.each([
    ['a short text', Buffer.from([0x61, 0xff, 0x62]), 'a\uFFFDb', 1],
    ['invalid bytes only', Buffer.from([0xff, 0xfe]), '\uFFFD\uFFFD', 2],
    ['an 8-bit encoding', Buffer.from('où est le café ?', 'latin1'), 'o\uFFFD est le caf\uFFFD ?', 2],
    ['a stray byte', Buffer.concat([Buffer.from('x'.repeat(500)), Buffer.from([0xff])]), `${'x'.repeat(500)}\uFFFD`, 1],
    ['a cut character at the end', Buffer.from('a界').subarray(0, 3), 'a\uFFFD', 1],
    ['its own U+FFFD', Buffer.from('a\uFFFDb'), 'a\uFFFDb', 0],
  ])('replaces and counts invalid bytes of %s', async (name, bytes, text, replaced) => {
    const [block] = await read(folder.write(`invalid/${name}.txt`, bytes));
    expect(block).toMatchObject({ documents: [text], replaced });
  });

  it('is not misled by a character across the end of the inspected part', async () => {
    const text = `x${'界'.repeat(30_000)}`;
    expect(await textOf(folder.write('edge.txt', text))).toEqual([text]);
  });

  it('reads a very long file in blocks that continue each other, and finds each again by its position', async () => {
    const text = Array.from({ length: 400_000 }, (_, line) => `line ${line} 界😀`).join('\n');
    const path = folder.write('large.txt', text);
    const blocks = await read(path, 2 * PIECE_LENGTH);
    expect(blocks.length).toBeGreaterThan(2);
    expect(blocks.map(({ documents }) => documents[0]).join('')).toBe(text);
    expect(blocks.map(({ continues }) => continues)).toEqual(blocks.map((_, index) => index > 0));
    expect(blocks.map(({ isPartial = false }) => isPartial)).toEqual(
      blocks.map((_, index) => index < blocks.length - 1),
    );
    // Blocks do not change the pieces.
    const pieces = blocks.flatMap(({ documents }) => [...cutText(documents[0] as string)]);
    expect(pieces.map((piece) => piece.length)).toEqual([...cutText(text)].map((piece) => piece.length));
    const file = { kind: 'text', name: path, location: path, size: 1, identity: '', parts: 1 } as const;
    const request = { file, part: 0, textField: '', opener: new BlobOpener({}) };
    const reader = await openText(request, 2 * PIECE_LENGTH);
    for (const position of [2, 0, 1]) expect(await reader.read(position)).toEqual(blocks[position]);
    await reader.close();
  });
});

const tokenizer = createGpt2Tokenizer();

describe('cutText', () => {
  it('cuts before white space that follows something else', () => {
    expect([...cutText('one two\n\nthree', 6)]).toEqual(['one', ' two', '\n\nthre', 'e']);
    expect([...cutText('short', 6)]).toEqual(['short']);
    expect([...cutText('', 6)]).toEqual([]);
  });

  it('never splits a character, and makes progress on runs without white space', () => {
    const pieces = [...cutText('😀'.repeat(10), 5)];
    expect(pieces).toEqual(new Array(5).fill('😀😀'));
  });

  it('loses nothing and respects the length, whatever the text', () => {
    const text = fc.string({ unit: 'binary', maxLength: 60 });
    fc.assert(
      fc.property(text, fc.integer({ min: 1, max: 9 }), (value, length) => {
        const pieces = [...cutText(value, length)];
        expect(pieces.join('')).toBe(value);
        expect(pieces.every((piece) => piece.length > 0 && piece.length <= length)).toBe(true);
      }),
    );
  });

  it('leaves the tokens of GPT-2 as they are where the text has white space', () => {
    const word = fc.constantFrom('the', "we'll", '12', '界', '!!', 'é');
    const space = fc.constantFrom(' ', '  ', '\n', '\n\n', '\t ', '\u00a0\n\n', '\u00a0');
    const text = fc.array(fc.tuple(word, space), { minLength: 1, maxLength: 40 });
    fc.assert(
      fc.property(text, (parts) => {
        const value = parts.flat().join('');
        const ids = [...cutText(value, 20)].flatMap((piece) => [...tokenizer.encode(piece)]);
        expect(ids).toEqual([...tokenizer.encode(value)]);
      }),
    );
  });
});
