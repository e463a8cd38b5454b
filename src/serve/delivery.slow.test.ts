/** An error in the delivery of an answer ends that answer only: one is thrown in every call of the answer path in turn. */
import { ServerResponse } from 'node:http';
import { afterAll, beforeAll, describe, expect, it, vi } from 'vitest';
import { createTokenizer, type Tokenizer } from '../data/tokenizer.js';
import { PieceWriter } from '../http/piece-writer.js';
import { IDLE_STATS } from '../infer/engine/interface.js';
import { ChoiceFormat } from './format.js';
import type { HostEvent, ModelHost } from './host.js';
import { packLogprobs } from './logprobs.js';
import { Metrics } from './metrics.js';
import { type RunningServer, startServer } from './server.js';

const usage = { promptTokens: 3, cachedTokens: 0, newTokens: 2, queueSeconds: 0, prefillSeconds: 0, decodeSeconds: 0 };
const at = (token: number) => ({ token, logprob: -1, top: [{ token: 66, logprob: -0.5 }] });
const info = {
  tokenizer: 'byte',
  vocabulary: 256,
  maxContext: 300_000,
  maxTokens: 300_000,
  maxBatch: 8,
  parameters: 1,
};

/** Answers every request with two tokens, each in an event of its own. */
const host: ModelHost = {
  info,
  failure: null,
  submit: ({ prompt, promptLogprobs }, listener) => {
    const logprobs = packLogprobs(promptLogprobs === undefined ? [] : Array.from(prompt.slice(1), at));
    const steps: HostEvent[][] = [
      [{ type: 'progress', total: prompt.length, cached: 0, processed: prompt.length }],
      [{ type: 'prompt', logprobs }],
      [{ type: 'token', token: 65, text: 'A', logprobs: at(65) }],
      [{ type: 'token', token: 66, text: 'B', logprobs: at(66) }],
      [{ type: 'end', text: '', finishReason: 'length', usage }],
    ];
    for (const step of steps) setImmediate(() => listener(step));
    return () => {};
  },
  trace: async () => {},
  stats: () => IDLE_STATS,
  close: async () => {},
};

let server: RunningServer;
beforeAll(async () => {
  server = await startServer(host, { id: 'm', port: 0 });
});
afterAll(() => server.drain(0));

const post = async (body: object, path = '/v1/completions') => {
  const response = await fetch(server.url + path, { method: 'POST', body: JSON.stringify(body) });
  return { status: response.status, text: await response.text() };
};
const whole = { prompt: [72, 105, 33], max_tokens: 2, logprobs: 1, echo: true, return_token_ids: true };
const bodies = {
  'a whole answer': whole,
  'a stream': { ...whole, stream: true, return_progress: true, stream_options: { include_usage: true } },
  'a long answer': { ...whole, prompt: new Array(5000).fill(65) },
  'a stream with a long echo': { ...whole, prompt: new Array(5000).fill(65), stream: true },
};

/** The methods that are called while an answer is delivered. */
const tokenizer = createTokenizer('byte');
const places: Readonly<Record<string, object>> = {
  ...Object.fromEntries(['write', 'end', 'writeHead', 'setHeader'].map((name) => [name, ServerResponse.prototype])),
  ...Object.fromEntries(
    ['whole', 'chunks', 'echo', 'echoChunks', 'role'].map((name) => [name, ChoiceFormat.prototype]),
  ),
  ...Object.fromEntries(['tokens', 'firstToken'].map((name) => [name, Metrics.prototype])),
  add: PieceWriter.prototype,
  stringify: JSON,
  submit: host,
};

describe.each(Object.keys(bodies) as (keyof typeof bodies)[])('an error in the delivery of %s', (name) => {
  it.each(Object.keys(places))('in %s', async (method) => {
    const owner = places[method];
    const body = JSON.stringify(bodies[name]);
    const faults: string[] = [];
    const uncaught = (error: Error) => faults.push(error.message);
    process.on('uncaughtException', uncaught).on('unhandledRejection', uncaught);
    const log = vi.spyOn(console, 'error').mockImplementation(() => {});
    const real = Reflect.get(owner, method) as (...values: unknown[]) => unknown;
    let [calls, throwAt] = [0, 0];
    Reflect.set(owner, method, function (this: unknown, ...values: unknown[]) {
      // The client of this test is in the same process, and JSON of others is not of the answer.
      if (calls++ === throwAt) throw new Error('thrown by the test');
      return real.apply(this, values);
    });
    try {
      for (; throwAt < 12; throwAt++) {
        calls = 0;
        const answer = fetch(`${server.url}/v1/completions`, {
          method: 'POST',
          body,
          signal: AbortSignal.timeout(5000),
        });
        await answer
          .then((response) => response.text())
          .catch((error: Error) => {
            if (error.name === 'TimeoutError') throw new Error(`no end after an error in call ${throwAt}`);
          });
        if (calls <= throwAt) break; // it has fewer calls
      }
    } finally {
      Reflect.set(owner, method, real);
      log.mockRestore();
      process.off('uncaughtException', uncaught).off('unhandledRejection', uncaught);
    }
    expect(faults).toEqual([]);
    const { status, text } = await post(whole);
    expect(status).toBe(200);
    expect(JSON.parse(text)).toMatchObject({ choices: [{ finish_reason: 'length' }] });
    expect((await fetch(`${server.url}/metrics`)).status).toBe(200);
  });

  it('by the tokenizer', async () => {
    const log = vi.spyOn(console, 'error').mockImplementation(() => {});
    const broken: Tokenizer = {
      ...tokenizer,
      decode: () => {
        throw new Error('thrown by the test');
      },
    };
    const format = vi.spyOn(ChoiceFormat.prototype, 'echo').mockImplementation(() => {
      broken.decode([1]);
      throw new Error('unreachable');
    });
    const answer = fetch(`${server.url}/v1/completions`, { method: 'POST', body: JSON.stringify(bodies[name]) });
    await answer.then((response) => response.text()).catch(() => {});
    expect(format).toHaveBeenCalled();
    for (const spy of [format, log]) spy.mockRestore();
    expect((await post(whole)).status).toBe(200);
  });
});

describe('an answer of 140,000 positions', () => {
  const prompt = Array.from({ length: 140_000 }, (_, i) => 65 + (i % 26));
  const text = String.fromCharCode(...prompt.slice(0, 26))
    .repeat(5385)
    .slice(0, 140_000);

  it('is whole', async () => {
    const body = { prompt, max_tokens: 2, echo: true, return_token_ids: true, logprobs: 1 };
    const [choice] = JSON.parse((await post(body)).text).choices;
    expect(choice.text).toBe(`${text}AB`);
    expect(choice.token_ids).toEqual([...prompt, 65, 66]);
    expect(choice.prompt_token_ids).toEqual(prompt);
    const { tokens, token_logprobs, top_logprobs, text_offset } = choice.logprobs;
    for (const list of [tokens, token_logprobs, top_logprobs, text_offset]) expect(list).toHaveLength(140_002);
    expect([token_logprobs[0], token_logprobs[1], top_logprobs[0]]).toEqual([null, -1, null]);
    expect(text_offset.slice(-2)).toEqual([140_000, 140_001]);
  });

  it('arrives in a stream by events of bounded size, and says the same', async () => {
    const body = { prompt, max_tokens: 2, echo: true, return_token_ids: true, logprobs: 1 };
    const [choice] = JSON.parse((await post(body)).text).choices;
    const streamed = (await post({ ...body, stream: true })).text;
    expect(streamed.endsWith('data: [DONE]\n\n')).toBe(true);
    const frames = streamed.split('\n\n').flatMap((frame) => /^data: (\{.*)$/.exec(frame)?.[1] ?? []);
    expect(Math.max(...frames.map(({ length }) => length))).toBeLessThan(2 ** 17);
    const pieces = frames.map((frame) => JSON.parse(frame).choices[0]);
    expect(pieces.map((piece) => piece.text).join('')).toBe(choice.text);
    expect(pieces.flatMap((piece) => piece.token_ids)).toEqual(choice.token_ids);
    for (const field of ['tokens', 'token_logprobs', 'top_logprobs', 'text_offset'])
      expect(pieces.flatMap(({ logprobs }) => logprobs[field])).toEqual(choice.logprobs[field]);
  });
});
