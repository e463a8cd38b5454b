import { R50K_TOKEN_SPLIT_REGEX } from 'gpt-tokenizer/encodingParams/constants';
import { describe, expect, it } from 'vitest';
import fc from '../../testing/properties.js';
import { DIFFICULT_TEXTS, LONE_SURROGATES } from '../testing/texts.js';
import { wordEnd } from './gpt2-words.js';

/** In the reference pattern \s is the Unicode property White_Space. */
const PATTERN = R50K_TOKEN_SPLIT_REGEX.source
  .replaceAll('\\s', '\\p{White_Space}')
  .replaceAll('\\S', '\\P{White_Space}');

const expected = (text: string): string[] => text.match(new RegExp(PATTERN, 'gu')) ?? [];

function wordsOf(text: string): string[] {
  // Units behind the text must not count.
  const units = new Uint16Array(text.length + 3).fill('s'.charCodeAt(0));
  for (let index = 0; index < text.length; index++) units[index] = text.charCodeAt(index);
  const words: string[] = [];
  for (let start = 0, end = 0; start < text.length; start = end) {
    end = wordEnd(units, text.length, start);
    words.push(text.slice(start, end));
  }
  return words;
}

describe('the words of GPT-2', () => {
  it.each([...Object.entries(DIFFICULT_TEXTS), ['lone surrogates', LONE_SURROGATES.text]])(
    'are those of its pattern in %s',
    (_, text) => expect(wordsOf(text)).toEqual(expected(text)),
  );

  it('are those of its pattern in any text', () => {
    const pieces = fc.constantFrom(
      ...["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'r", "'l", "'v", "'", "'S", ' ', '  ', '\t', '\n', '\r\n'],
      ...['a', 'É', '界', '1', '½', '٣', '!', '_', '\u0085', '\uFEFF', '\u00a0', '\u2028', '\u3000', '\u0301'],
      ...['😀', '𝒳', '𝟙', '𐍈', '\ud83d', '\ude00', '\udbff', '\udc00'],
    );
    const text = fc.oneof(
      fc.array(pieces, { maxLength: 40 }).map((parts) => parts.join('')),
      fc.array(fc.integer({ min: 0, max: 0xffff }), { maxLength: 40 }).map((units) => String.fromCharCode(...units)),
      fc.string({ unit: 'binary', maxLength: 60 }),
    );
    fc.assert(
      fc.property(text, (value) => {
        expect(wordsOf(value)).toEqual(expected(value));
      }),
      { numRuns: 1000 },
    );
  });

  it('are those of its pattern for every code point', () => {
    const wrong: number[] = [];
    for (let first = 0; first < 0x110000; first += 256) {
      const text = Array.from({ length: 256 }, (_, index) => ` a${String.fromCodePoint(first + index)}1`).join('');
      if (wordsOf(text).join('|') !== expected(text).join('|')) wrong.push(first);
    }
    expect(wrong).toEqual([]);
  });
});
