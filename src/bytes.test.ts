import { Buffer } from 'node:buffer';
import { describe, expect, it } from 'vitest';
import { areSameBytes, byteString, bytesOfString, joinBytes, utf8 } from './bytes.js';

const TEXTS = ['', 'plain', 'Grüße, 世界 🌍', '\u0000\uFEFF\uD800', 'ä'.repeat(20_000)];

describe('bytes', () => {
  it.each(TEXTS)('are those of a Buffer', (text) => {
    const buffer = Buffer.from(text, 'utf8');
    expect(areSameBytes(utf8(text), buffer)).toBe(true);
    expect(byteString(utf8(text))).toBe(buffer.toString('latin1'));
    expect(areSameBytes(bytesOfString(buffer.toString('latin1')), buffer)).toBe(true);
  });

  it('are joined and compared', () => {
    const joined = joinBytes([utf8('ab'), new Uint8Array(), utf8('c')]);
    expect(areSameBytes(joined, utf8('abc'))).toBe(true);
    expect(areSameBytes(joined, utf8('abd'))).toBe(false);
    expect(areSameBytes(joined, utf8('ab'))).toBe(false);
  });
});
