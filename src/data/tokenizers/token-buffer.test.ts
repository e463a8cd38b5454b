import { describe, expect, it } from 'vitest';
import { createTokenizer } from '../tokenizer.js';
import { TokenBuffer } from './token-buffer.js';

describe('a token buffer', () => {
  it('grows and keeps what it holds', () => {
    const tokens = new TokenBuffer(2);
    for (let part = 0; part < 50; part++) tokens.append(Int32Array.of(part, 100 - part, part));
    expect(tokens.length).toBe(150);
    expect([...tokens.ids.subarray(0, 150)]).toEqual(
      Array.from({ length: 50 }, (_, part) => [part, 100 - part, part]).flat(),
    );
  });

  it('gives room behind what it holds, in other memory when there is none', () => {
    const tokens = new TokenBuffer(4);
    tokens.append(Int32Array.of(1, 2, 3));
    const before = tokens.ids;
    expect(tokens.reserve(1)).toBe(before);
    expect(tokens.reserve(2)).not.toBe(before);
    expect([...tokens.ids.subarray(0, 3)]).toEqual([1, 2, 3]);
    expect(tokens.length).toBe(3);
  });

  it('takes the texts of GPT-2’s tokenizer one behind the other, as they are encoded alone', () => {
    const tokenizer = createTokenizer('gpt2');
    const texts = ['Hello world', '', ' 你好 \n\n', '😀'.repeat(500), 'x'.repeat(3000)];
    const tokens = new TokenBuffer(1);
    for (const text of texts) tokenizer.encodeInto!(text, tokens);
    expect([...tokens.ids.subarray(0, tokens.length)]).toEqual(texts.flatMap((text) => [...tokenizer.encode(text)]));
  });
});
