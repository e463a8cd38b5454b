import { describe, expect, it } from 'vitest';
import { createTokenizer } from '../data/tokenizer.js';
import { UsageError } from '../errors.js';
import { StructuredOutput } from '../infer/structured/structured-output.js';
import { ApiError } from './errors.js';
import { parseCompletion, type ServedModel } from './protocol.js';

const bytes = createTokenizer('byte');
const info = { tokenizer: 'byte', vocabulary: 256, maxContext: 20_000, maxTokens: 20_000, maxBatch: 1, parameters: 1 };
let encoded = 0;
const tokenizer = {
  ...bytes,
  encode: (text: string) => {
    encoded += 1;
    if (text.includes('!')) throw new UsageError('not a text of this tokenizer');
    return bytes.encode(text);
  },
};
const structured = new StructuredOutput(bytes, 256, []);
const model: ServedModel = { id: 'm', info, tokenizer, chat: null, structured };

describe('the tokens of a text', () => {
  const long = 'a'.repeat(10_000);

  it('are computed when a stream is answered, if they fit in any case', () => {
    encoded = 0;
    const job = parseCompletion({ prompt: long, stream: true }, model);
    expect([encoded, job.promptTokens]).toEqual([0, 2500]);
    expect(job.request(0).prompt).toHaveLength(10_000);
    expect(job.request(0).prompt).toHaveLength(10_000);
    expect(encoded).toBe(1);
    const wrong = parseCompletion({ prompt: `${long}!`, stream: true }, model);
    expect(() => wrong.request(0)).toThrow(ApiError);
  });

  it.each([
    ['a short text', { prompt: 'a!', stream: true }],
    ['a whole answer', { prompt: `${long}!` }],
    ['a text of more bytes than fit', { prompt: `${long}${long}!`, stream: true }],
    ['a format', { prompt: `${long}!`, stream: true, response_format: { type: 'json_object' }, max_tokens: 99 }],
  ])('are checked before the answer begins: %s', (_, body) => {
    expect(() => parseCompletion(body, model)).toThrow('not a text of this tokenizer');
  });
});
