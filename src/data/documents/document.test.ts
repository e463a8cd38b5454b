import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { createGpt2Tokenizer } from '../tokenizers/gpt2.js';
import { cutText } from './document.js';

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
