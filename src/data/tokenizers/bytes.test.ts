import { describe, expect, it } from 'vitest';
import { TrefoilError } from '../../errors.js';
import { checkedId, createByteStreamDecoder, decodeUtf8 } from './bytes.js';

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
