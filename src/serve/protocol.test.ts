import { describe, expect, it } from 'vitest';
import { createTokenizer } from '../data/tokenizer.js';
import { UsageError } from '../errors.js';
import { HttpError } from '../http/error.js';
import { StructuredOutput } from '../infer/structured/structured-output.js';
import { threadMilliseconds } from '../time-limit.js';
import { roomWarnings } from './host.js';
import { type Job, PARSERS, parseCompletion, requestOf, type ServedModel, tokenize } from './protocol.js';

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

  it('are computed after a stream was accepted, if they fit in any case', () => {
    encoded = 0;
    const accepted: Job[] = [];
    const { job, prompts } = parseCompletion({ prompt: long, stream: true }, model, (early) => {
      expect(encoded).toBe(0);
      accepted.push(early);
    });
    expect(accepted.map(({ promptTokens }) => promptTokens)).toEqual([2500]);
    expect(job.promptTokens).toBe(10_000);
    expect(requestOf(job, prompts, 0).prompt).toHaveLength(10_000);
    expect(encoded).toBe(1);
    const wrong = () => parseCompletion({ prompt: `${long}!`, stream: true }, model, (early) => accepted.push(early));
    expect(wrong).toThrow(HttpError);
    expect(accepted).toHaveLength(2);
  });

  it.each([
    ['a short text', { prompt: 'a!', stream: true }],
    ['a whole answer', { prompt: `${long}!` }],
    ['a text of more bytes than fit', { prompt: `${long}${long}!`, stream: true }],
    ['a format', { prompt: `${long}!`, stream: true, response_format: { type: 'json_object' }, max_tokens: 99 }],
  ])('are checked before the answer begins: %s', (_, body) => {
    expect(() => parseCompletion(body, model)).toThrow(HttpError);
  });
});

it('every sampling parameter of a body reaches the sampler', () => {
  const sampling = { temperature: 0.5, top_k: 7, top_p: 0.9, min_p: 0.1, repetition_penalty: 1.5 };
  const others = { frequency_penalty: 0.5, presence_penalty: -0.5, logit_bias: { 65: -100, 7: 2 }, seed: 3 };
  const { job, prompts } = parseCompletion({ prompt: 'a', ...sampling, ...others }, model);
  const camel = Object.entries({ ...sampling, ...others }).map(([name, value]) => [
    name.replace(/_(.)/g, (_, c) => c.toUpperCase()),
    value,
  ]);
  expect(requestOf(job, prompts, 0).sampling).toEqual(Object.fromEntries(camel));
});

describe('a prompt that does not fit is refused', () => {
  const refusal = (room: object, body: object) => () => parseCompletion(body, { ...model, info: { ...info, ...room } });
  const prompt = new Array(1000).fill(65);

  it('by the setting that bounds it', () => {
    expect(refusal({ maxContext: 1000 }, { prompt })).toThrow(
      'the prompt has 1000 tokens; at most 999 fit: shorten the prompt, or raise maxContext (--max-context)',
    );
    expect(refusal({ maxTokens: 1000 }, { prompt })).toThrow(
      'the prompt has 1000 tokens; at most 999 fit: shorten the prompt, or raise cacheBytes (--cache-gb)',
    );
    expect(refusal({ maxTokens: 1010 }, { prompt, max_tokens: 11 })).toThrow(
      'the prompt has 1000 tokens and may get 11 more; memory holds 1010 together: ask for fewer tokens, or raise cacheBytes (--cache-gb)',
    );
    expect(refusal({ maxTokens: 1010 }, { prompt, max_tokens: 10 })).not.toThrow();
    expect(refusal({ maxTokens: 1010 }, { prompt, max_tokens: 2000 })).toThrow(
      'the prompt has 1000 tokens and may get 2000 more',
    );
  });

  it('with a count that says when it is a lower bound', () => {
    const gpt2 = createTokenizer('gpt2');
    const gptModel = { ...model, info: { ...info, vocabulary: 50_257, maxContext: 100 }, tokenizer: gpt2 };
    expect(() => parseCompletion({ prompt: 'a '.repeat(50_000) }, gptModel)).toThrow(
      /^the prompt has at least \d+ tokens; at most 99 fit/,
    );
    expect(() => parseCompletion({ prompt: 'a '.repeat(500) }, gptModel)).toThrow(
      /^the prompt has \d+ tokens; at most 99 fit/,
    );
  });

  it('and a server says at its start that memory holds less than the context', () => {
    expect(roomWarnings({ maxContext: 2000, maxTokens: 1000 })).toEqual([
      'memory holds requests of 1000 of 2000 tokens: lower --max-context, or raise --cache-gb',
    ]);
    expect(roomWarnings(info)).toEqual([]);
  });

  it('and /tokenize answers with the most that fits', () => {
    expect(tokenize({ prompt: 'a' }, { ...model, info: { ...info, maxTokens: 1000 } })).toMatchObject({
      max_model_len: 1000,
    });
  });
});

describe('a request is refused before work starts', () => {
  const refused = (body: object, message: string) => expect(() => parseCompletion(body, model)).toThrow(message);
  const echo = { echo: true, max_tokens: 1, logprobs: 20 };

  it('if its answer would list too much: tokens times choices times probabilities', () => {
    const prompt = new Array(7300).fill(65);
    refused({ prompt, n: 128, ...echo }, 'the answer may list 19625088 tokens');
    refused({ prompt, n: 128, max_tokens: 10_000, return_token_ids: true }, 'lower max_tokens, n or logprobs');
    refused({ prompt: 'a', n: 128, max_tokens: 10_000, logprobs: 5 }, 'lower max_tokens, n or logprobs');
    expect(parseCompletion({ prompt, n: 8, ...echo }, model).job.listed).toBe(8 * 7301 * 21);
    expect(parseCompletion({ prompt, n: 128, max_tokens: 10_000 }, model).job.listed).toBe(0);
  });

  it('if a penalty would make logits infinite', () => {
    for (const repetition_penalty of [1e-300, 0.0009, 1001, 1e300])
      refused({ prompt: 'a', repetition_penalty }, 'repetition_penalty');
  });

  it.each([
    ...['best_of', 'suffix', 'tools', 'tool_choice', 'functions'],
    ...['function_call', 'parallel_tool_calls', 'modalities', 'audio', 'prediction', 'reasoning_effort'],
    ...['web_search_options', 'store', 'service_tier', 'verbosity'],
  ])('if %s is not supported, however deep it is', (name) => {
    let deep: unknown = 1;
    for (let i = 0; i < 5000; i++) deep = [deep];
    refused({ prompt: 'a', [name]: deep }, `the parameter ${name} is not supported`);
  });

  it('if its metadata is large, which an answer may repeat three times', () => {
    refused({ prompt: 'a', metadata: { a: 'x'.repeat(2 ** 14) } }, 'metadata: has more than 16384 characters');
    refused({ prompt: 'a', metadata: Array(10_000).fill(1) }, 'metadata: has more than 16384 characters');
    for (const metadata of [undefined, null, {}, { user_id: 'a' }])
      expect(parseCompletion({ prompt: 'a', metadata }, model).job).toBeDefined();
  });

  it('with a message that repeats little of it', () => {
    const long = 'x'.repeat(10_000);
    const messages = [
      { prompt: 'a', model: long },
      { prompt: 'a', logit_bias: { [long]: 1 } },
      { prompt: 'a', stop: [long, long] },
    ].map((body) => {
      try {
        parseCompletion(body, model);
      } catch (error) {
        return (error as Error).message;
      }
      return '';
    });
    for (const message of messages) {
      expect(message).not.toBe('');
      expect(message.length).toBeLessThan(500);
    }
  });

  it('at the first message or part that is wrong', () => {
    const chat = { ...model, chat: { templates: new Map([['default', 'x']]), variables: {} } };
    const many = new Array(200_000).fill(1);
    const startedAt = threadMilliseconds();
    for (const messages of [many, [{ role: 'user', content: many }]])
      expect(() => PARSERS.chat({ messages }, chat, () => {})).toThrow(/^messages\.0/);
    expect(() => PARSERS.detokenize({ tokens: new Array(200_000).fill(-1) }, model, () => {})).toThrow(/^tokens/);
    expect(threadMilliseconds() - startedAt).toBeLessThan(1000); // 3 s with an error for each
  });
});
