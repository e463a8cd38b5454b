import { describe, expect, it } from 'vitest';
import { TrefoilError } from '../../errors.js';
import fc from '../../testing/properties.js';
import { DIFFICULT_TEXTS, LONE_SURROGATES, streamed } from '../testing/texts.js';
import { checkedId, createByteStreamDecoder, createByteTokenizer, decodeUtf8 } from './bytes.js';

describe('decodeUtf8', () => {
  it('keeps a byte order mark and replaces invalid bytes', () => {
    expect(decodeUtf8(Uint8Array.of(0xef, 0xbb, 0xbf, 0x41, 0xff))).toBe('\uFEFFA\uFFFD');
  });
});

describe('createByteStreamDecoder', () => {
  it('joins characters over tokens of any bytes', () => {
    const tokens = [Uint8Array.of(0x61, 0xe2), Uint8Array.of(0x82), Uint8Array.of(0xac, 0xf0), Uint8Array.of()];
    const decoder = createByteStreamDecoder((id) => tokens[id]);
    expect([0, 1, 2, 3].map((id) => decoder.push(id))).toEqual(['a', '', '€', '']);
    expect(decoder.end()).toBe('\uFFFD');
  });
});

describe('checkedId', () => {
  it('lets ids of the vocabulary pass and names others', () => {
    expect([0, 9].map((id) => checkedId(id, 10, 'x'))).toEqual([0, 9]);
    for (const id of [-1, 10, 0.5, Number.NaN]) {
      expect(() => checkedId(id, 10, 'x')).toThrow(TrefoilError);
      expect(() => checkedId(id, 10, 'x')).toThrow(`token ${id} is outside the vocabulary of tokenizer x (0 to 9)`);
    }
  });
});

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
