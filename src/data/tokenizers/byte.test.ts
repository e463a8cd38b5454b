import { describe, expect, it } from 'vitest';
import fc from '../../testing/properties.js';
import { DIFFICULT_TEXTS, LONE_SURROGATES, streamed } from '../testing/texts.js';
import { createByteTokenizer } from './byte.js';

const tokenizer = createByteTokenizer();

describe('byte tokenizer', () => {
  it.each(Object.entries(DIFFICULT_TEXTS))('returns %s unchanged', (_, text) => {
    const ids = tokenizer.encode(text);
    expect([...ids]).toEqual([...Buffer.from(text)]);
    expect(tokenizer.decode(ids)).toBe(text);
    expect(streamed(tokenizer.createStreamDecoder(), ids).text).toBe(text);
  });

  it('returns any text unchanged', () => {
    fc.assert(
      fc.property(fc.string({ unit: 'binary', maxLength: 200 }), (text) => {
        expect(tokenizer.decode(tokenizer.encode(text))).toBe(text);
      }),
    );
  });

  it('writes U+FFFD for lone surrogates', () => {
    expect(tokenizer.decode(tokenizer.encode(LONE_SURROGATES.text))).toBe(LONE_SURROGATES.decoded);
  });

  it('holds back an unfinished character and replaces it at the end', () => {
    const ids = tokenizer.encode('a€b');
    expect(streamed(tokenizer.createStreamDecoder(), ids).parts).toEqual(['a', '', '', '€', 'b', '']);
    expect(streamed(tokenizer.createStreamDecoder(), ids.slice(0, 3)).parts).toEqual(['a', '', '', '\uFFFD']);
  });

  it('keeps nothing from one decoding to the next', () => {
    expect(tokenizer.decode([0xe2, 0x82])).toBe('\uFFFD');
    expect(tokenizer.decode([0x41])).toBe('A');
  });

  it('names an id outside the vocabulary', () => {
    expect(() => tokenizer.decode([65, 256])).toThrow(
      'token 256 is outside the vocabulary of tokenizer byte (0 to 255)',
    );
    expect(() => tokenizer.createStreamDecoder().push(-1)).toThrow('token -1');
  });
});
