import { describe, expect, it } from 'vitest';
import { randomNumbers } from '../testing/random.js';
import { parseBody } from './body.js';

const FILL = ' '.repeat(5000); // large enough for the fast way
const parsed = (text: string) => parseBody(Buffer.from(text));
/** As `JSON.parse` gives it. */
const plain = (value: unknown) =>
  JSON.parse(JSON.stringify(value, (_, one) => (one instanceof Int32Array ? [...one] : one)));

describe('a body', () => {
  it('has its tokens as typed numbers', () => {
    const tokens = Array.from({ length: 3000 }, (_, i) => (i * 7919) % 50_257);
    const body = { model: 'a "quoted" \\ name', nested: { prompt: [1, 2] }, prompt: tokens, stop: ['[', '}'], n: 1 };
    for (const space of [0, 2]) {
      const given = parsed(JSON.stringify(body, null, space)) as { prompt: unknown };
      expect(given.prompt).toBeInstanceOf(Int32Array);
      expect(plain(given)).toEqual(body);
    }
  });

  it.each([
    ['a text', '{"prompt": "[1,2]"}'],
    ['texts', '{"prompt": ["1", "2"]}'],
    ['lists of tokens', '{"prompt": [[1], [2, 3]]}'],
    ['an empty list', '{"prompt": []}'],
    ['a negative number', '{"prompt": [1, -2]}'],
    ['a fraction', '{"prompt": [1.5]}'],
    ['an exponent', '{"prompt": [1e3]}'],
    ['a number beyond 32 bits', '{"prompt": [2147483648]}'],
    ['in another object', '{"a": {"prompt": [1, 2]}}'],
    ['in a list', '[{"prompt": [1, 2]}]'],
    ['a similar name', '{"prompts": [1, 2], "aprompt": [3]}'],
    ['given twice', '{"prompt": [1, 2], "prompt": "x"}'],
    ['given twice, the last one null', '{"prompt": [1, 2], "prompt": null}'],
    ['of another type', '[1, 2]'],
  ])('is what JSON.parse gives: prompt %s', (_, text) => {
    expect(parsed(text + FILL)).toEqual(JSON.parse(text));
    expect(parsed(text)).toEqual(JSON.parse(text));
  });

  it('may name the prompt with an escape, or give it twice', () => {
    expect(plain(parsed(`{"prom\\u0070t": [1, 2], "prompt": [3]}${FILL}`))).toEqual({ prompt: [3] });
    expect(plain(parsed(`{"prompt": [3], "prom\\u0070t": [1, 2]}${FILL}`))).toEqual({ prompt: [1, 2] });
  });

  it.each([
    '{"prompt": [1, 2',
    '{"prompt": [1, 2}',
    '{"prompt": [1, 02]}',
    '{"prompt": [1,, 2]}',
    '{"prompt": [1, 2,]}',
    '{"prompt": [1 2]}',
    '{"prompt": [1, 2]} x',
    '{"prompt": [1, 2], }',
    '{"prompt" [1, 2]}',
    '{prompt: [1, 2]}',
    '{"a": "b, "prompt": [1, 2]}',
    '{"prompt": [1,\v2]}',
  ])('that is not JSON is refused: %s', (text) => {
    expect(() => parsed(text + FILL)).toThrow();
    expect(() => JSON.parse(text)).toThrow();
  });

  it('that is damaged anywhere is what JSON.parse makes of it', () => {
    const next = randomNumbers(3);
    const text = `{"model": "m", "prompt": [${Array.from({ length: 1500 }, (_, i) => i).join(', ')}], "n": 1}`;
    for (let round = 0; round < 400; round++) {
      const bytes = Buffer.from(text);
      const byte = Buffer.from('"\\,:[]{}0 a-')[Math.floor(next() * 12)];
      bytes[Math.floor(next() * (round % 2 === 0 ? 40 : bytes.length))] = byte;
      const attempt = (parse: () => unknown) => {
        try {
          return plain(parse());
        } catch {
          return 'refused';
        }
      };
      expect(attempt(() => parseBody(bytes))).toEqual(attempt(() => JSON.parse(bytes.toString())));
    }
  });
});
