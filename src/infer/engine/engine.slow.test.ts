import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setImmediate } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it, vi } from 'vitest';
import { HERMES } from '../../data/answer-form.js';
import { createTokenizer } from '../../data/tokenizer.js';
import { UsageError } from '../../errors.js';
import type { LanguageModel } from '../../model/language-model.js';
import { EmulatedCuda } from '../../testing/emulated-cuda.js';
import { lastLogits } from '../decode.js';
import { DeviceDecoder } from '../device-decoder.js';
import type { ToolCalls } from '../structured/calls.js';
import { tinyConfig, tinyModel } from '../testing/tiny-model.js';
import type { TextSource } from '../text-source.js';
import { createEngine } from './create.js';
import type { Engine, EngineOptions } from './interface.js';
import { type EngineEvent, type EngineRequest, RequestRefused, type TokenMask } from './request.js';
import { createSampler, type SamplingOptions } from './sampler.js';

const models: LanguageModel[] = [];
afterAll(() => {
  for (const model of models) model.free();
});

function source(sections: Parameters<typeof tinyConfig>[0] = {}): TextSource {
  const config = tinyConfig(sections);
  const model = tinyModel(config);
  models.push(model);
  return { model, config, tokenizer: createTokenizer('byte') };
}

/** The marker is a letter, so that a free text often becomes a call. */
const CALLS: ToolCalls = {
  type: 'tool_calls',
  form: { calls: { ...HERMES, marker: 'e' }, reasoning: null },
  tools: [
    { name: 'add', schema: { type: 'object', properties: { a: { type: 'integer' } }, required: ['a'] } },
    { name: 'find', schema: { type: 'object', properties: { text: { type: 'string' } } } },
  ],
  ...{ isRequired: true, isParallel: true, document: null },
};
const sparse = source();
const LIMITS = { cacheBytes: 2 ** 26, prefixCacheBytes: 2 ** 24, tile: 16 };

async function events(engine: Engine, request: EngineRequest): Promise<EngineEvent[]> {
  const all: EngineEvent[] = [];
  for await (const event of engine.submit(request)) all.push(event);
  return all;
}

/** The part of the events that a client sees: everything but times and cache hits. */
function answer(all: readonly EngineEvent[]) {
  const end = all.at(-1);
  if (end?.type !== 'end') throw new Error('the last event is not the end');
  const tokens = all.filter((event) => event.type === 'token');
  return {
    tokens: tokens.map(({ token }) => token),
    text: tokens.map(({ text }) => text).join('') + end.text,
    finish: end.finishReason,
    logprobs: tokens.map(({ logprobs }) => logprobs),
    prompt: all.flatMap((event) => (event.type === 'prompt' ? event.logprobs : [])),
  };
}

async function withEngine<T>(of: TextSource, options: EngineOptions, body: (engine: Engine) => Promise<T>): Promise<T> {
  const { pool } = of.model.device;
  const before = pool.bytesInUse;
  const engine = createEngine(of, { ...LIMITS, ...options });
  try {
    return await body(engine);
  } finally {
    await engine.close();
    expect(engine.stats()).toMatchObject({ running: 0, waiting: 0, reservedBytes: 0, pageBytes: 0 });
    expect(pool.bytesInUse).toBe(before);
  }
}

/** Deterministic numbers in [0, 1). */
function random(seed: number): () => number {
  let state = seed * 2654435761 + 1;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

const text = (length: number, seed: number) =>
  Array.from({ length }, (_, i) => (i * i * 7 + i * 91 * seed + seed) % 256);

/** Mixed requests; some begin with one of three long prefixes. */
function randomRequest(next: () => number): EngineRequest {
  const whole = (most: number) => Math.floor(next() * most);
  const prefix = next() < 0.5 ? text(260 + 128 * whole(3), whole(3)) : [];
  const prompt = [...prefix, ...text(1 + whole(90), 10 + whole(50))];
  const logprobs = next() < 0.3 ? { logprobs: whole(4) } : {};
  const promptLogprobs = next() < 0.1 ? { promptLogprobs: 2 } : {};
  const temperature = next() < 0.3 ? 0 : 0.5 + next();
  if (next() < 0.1)
    return {
      prompt,
      maxNewTokens: 2 + whole(24),
      sampling: { seed: whole(1e6) },
      responseFormat: { type: 'json_object' },
    };
  if (next() < 0.2)
    return {
      prompt,
      maxNewTokens: 90 + whole(60),
      stop: ['e'],
      sampling: { seed: whole(1e6), frequencyPenalty: next(), logitBias: { [whole(256)]: -100 } },
      responseFormat: { ...CALLS, isRequired: next() < 0.6 },
    };
  return {
    prompt,
    maxNewTokens: whole(24),
    ...logprobs,
    ...promptLogprobs,
    stop: next() < 0.2 ? ['e', 'ab'] : [],
    minNewTokens: whole(4),
    ignoreSeparator: next() < 0.2,
    cacheSalt: next() < 0.2 ? 'other' : '',
    sampling: {
      temperature,
      topK: whole(3) * 20,
      topP: next() < 0.5 ? 1 : 0.9,
      minP: next() < 0.8 ? 0 : 0.05,
      repetitionPenalty: next() < 0.8 ? 1 : 1.3,
      frequencyPenalty: next() < 0.7 ? 0 : 0.5,
      presencePenalty: next() < 0.7 ? 0 : -0.7,
      logitBias: next() < 0.7 ? {} : { [whole(256)]: -100, [whole(256)]: 4, 0: -3 },
      seed: whole(1e6),
    },
  };
}

const isLong = process.env['TREFOIL_LONG'] === '1';
if (!isLong) console.log('engine: 60 of 500 random requests (all with TREFOIL_LONG=1)');

describe('the same answer under load', () => {
  it.each<[string, Parameters<typeof tinyConfig>[0], number]>([
    ['sparse', { nsa: { w: 70, n_sel: 5 } }, isLong ? 500 : 60],
    ['phi mlp', { nsa: { phi: 'mlp', gate: 'sigmoid' } }, isLong ? 200 : 12],
    ['dense', { model: { attention: 'dense' } }, isLong ? 500 : 24],
    ['window layers', { model: { layer_pattern: ['window', 'nsa'] }, nsa: { w: 70 } }, isLong ? 500 : 24],
  ])('as alone, bit for bit: %s', async (_, sections, count) => {
    const of = source(sections);
    const next = random(7);
    const requests = Array.from({ length: count }, () => randomRequest(next));
    const alone = await withEngine(of, { maxBatch: 1, prefixCacheBytes: 0, tile: 4096 }, async (engine) => {
      const results = [];
      for (const request of requests) results.push(answer(await events(engine, request)));
      return results;
    });
    await withEngine(of, { maxBatch: 7, maxQueued: count, tile: 50 }, async (engine) => {
      const cancelled: number[] = [];
      const results = await Promise.all(
        requests.map(async (request, i) => {
          for (let wait = 0; wait < (i % 9) * 5; wait++) await setImmediate();
          const abort = i % 11 === 3 ? new AbortController() : null;
          const all: EngineEvent[] = [];
          for await (const event of engine.submit({ ...request, ...(abort ? { signal: abort.signal } : {}) })) {
            all.push(event);
            if (abort && event.type === 'token' && all.length > 4) abort.abort();
          }
          const given = answer(all);
          if (given.finish === 'aborted') cancelled.push(i);
          return given;
        }),
      );
      results.forEach((result, i) => {
        if (!cancelled.includes(i)) expect(result, `request ${i}`).toEqual(alone[i]);
        else expect(alone[i].tokens.slice(0, result.tokens.length), `request ${i}`).toEqual(result.tokens);
      });
      if (count < 20) return; // too few for both to be certain
      expect(cancelled.length).toBeGreaterThan(0);
      expect(engine.stats().prefixHits).toBeGreaterThan(0);
    });
  });

  it('is that of a model that reads the whole context for every token', async () => {
    const prompt = text(300, 3);
    const { tokens } = await withEngine(sparse, {}, async (engine) => {
      await events(engine, { prompt, maxNewTokens: 1 });
      return answer(await events(engine, { prompt, maxNewTokens: 12, sampling: { seed: 9 }, ignoreSeparator: true }));
    });
    const context = [...prompt];
    const sample = createSampler({ seed: 9 });
    for (let draw = 0; draw < 12; draw++) context.push(sample(lastLogits(sparse.model, context), draw));
    expect(tokens).toEqual(context.slice(300));
  });
});

describe('a text', () => {
  it('ends at the end tokens of the tokenizer and at those of the model', async () => {
    const request = { prompt: text(40, 5), maxNewTokens: 12, sampling: { seed: 4 } };
    const { tokens } = await withEngine(sparse, {}, async (engine) =>
      answer(await events(engine, { ...request, ignoreSeparator: true })),
    );
    const [third] = tokens.slice(2);
    const ended = await withEngine({ ...sparse, endTokens: [third] }, {}, async (engine) =>
      answer(await events(engine, request)),
    );
    expect([ended.finish, ended.tokens.length]).toEqual(['separator', tokens.indexOf(third)]);
  });
});

it('runs once before the first request, and keeps no page', async () => {
  await withEngine(sparse, {}, async (engine) => {
    await engine.warmUp();
    expect(engine.stats()).toMatchObject({ pageBytes: 0, reservedBytes: 0, prefixQueries: 0 });
  });
});

describe('the prefix cache', () => {
  it('reads the last token of a repeated prompt, and others from a common block on, for the same salt only', async () => {
    await withEngine(sparse, { tile: 128 }, async (engine) => {
      const cached = async (prompt: number[], cacheSalt = '') => {
        const [end] = (await events(engine, { prompt, maxNewTokens: 1, cacheSalt })).slice(-1);
        return end.type === 'end' ? end.usage.cachedTokens : null;
      };
      expect(await cached(text(400, 1))).toBe(0);
      expect(await cached(text(400, 1))).toBe(399);
      expect(await cached([...text(400, 1), 7])).toBe(399); // a text that goes on
      expect(await cached(text(385, 1))).toBe(384);
      expect(await cached(text(384, 1))).toBe(256); // the last token is read to get its logits
      expect(await cached(text(384, 1))).toBe(383);
      expect(await cached(text(400, 1), 'other')).toBe(0);
      expect(await cached([...text(256, 1), ...text(100, 2)])).toBe(256);
      expect(engine.stats()).toMatchObject({
        prefixQueries: 400 * 3 + 401 + 385 + 384 * 2 + 356,
        prefixHits: 399 * 2 + 384 + 256 + 383 + 256,
      });
    });
  });

  it('reads what requests that arrive together have in common once', async () => {
    await withEngine(sparse, { tile: 128, idleTile: 512 }, async (engine) => {
      const prompts = [text(700, 1), text(700, 1), [...text(300, 1), ...text(300, 2)], text(700, 3)];
      const ask = (prompt: number[]) => events(engine, { prompt, maxNewTokens: 3, logprobs: 1, sampling: { seed: 4 } });
      const together = await Promise.all(prompts.map(ask));
      const cached = together.map((all) => {
        const end = all.at(-1);
        return end?.type === 'end' ? end.usage.cachedTokens : null;
      });
      // The third prompt shares 256 tokens, but the first one was read, and is kept, in passes of 512.
      expect(cached).toEqual([0, 640, 0, 0]);
      expect(engine.stats().prefixHits).toBe(640);
      await withEngine(sparse, { prefixCacheBytes: 0 }, async (other) => {
        const alone = await events(other, { prompt: prompts[1], maxNewTokens: 3, logprobs: 1, sampling: { seed: 4 } });
        expect(answer(together[1])).toEqual(answer(alone));
      });
    });
    // Without room for more than a block, or when the first one leaves, everyone reads its own.
    await withEngine(sparse, { tile: 128, prefixCacheBytes: 100_000 }, async (engine) => {
      const abort = new AbortController();
      const first = events(engine, { prompt: text(900, 1), maxNewTokens: 3, signal: abort.signal });
      const others = [1, 2].map(() => events(engine, { prompt: text(900, 1), maxNewTokens: 3, sampling: { seed: 4 } }));
      await setImmediate();
      abort.abort();
      expect(answer(await first).finish).toBe('aborted');
      const [one, two] = (await Promise.all(others)).map(answer);
      expect(one).toEqual(two);
    });
  });

  it('keeps what was generated', async () => {
    await withEngine(sparse, { tile: 128 }, async (engine) => {
      const first = answer(await events(engine, { prompt: text(100, 1), maxNewTokens: 60, ignoreSeparator: true }));
      const prompt = [...text(100, 1), ...first.tokens];
      const [end] = (await events(engine, { prompt, maxNewTokens: 1 })).slice(-1);
      expect(end).toMatchObject({ usage: { cachedTokens: 128 } });
    });
  });

  it('stays within its memory and evicts what was used least recently', async () => {
    await withEngine(sparse, { tile: 128, prefixCacheBytes: 600_000, maxBatch: 4 }, async (engine) => {
      const cached = async (seed: number) => {
        const [end] = (await events(engine, { prompt: text(300, seed), maxNewTokens: 2 })).slice(-1);
        return end.type === 'end' ? end.usage.cachedTokens : null;
      };
      for (let seed = 1; seed < 30; seed++) {
        await cached(seed);
        expect(engine.stats().pageBytes).toBeLessThanOrEqual(600_000);
      }
      expect(engine.stats().pageBytes).toBeGreaterThan(300_000);
      expect(await cached(29)).toBe(299);
      expect(await cached(1)).toBe(0);
    });
  });
});

describe('limits', () => {
  it('refuse at once what can never fit, and what is wrong', async () => {
    await withEngine(sparse, { maxContext: 500, cacheBytes: 150_000 }, async (engine) => {
      const refusal = (request: EngineRequest) => {
        try {
          engine.submit(request);
        } catch (error) {
          return error instanceof RequestRefused ? `${error.reason}: ${error.message}` : error;
        }
        return null;
      };
      expect(refusal({ prompt: text(500, 1) })).toBe(
        `too_large: the prompt has 500 tokens; at most ${engine.maxTokens - 1} fit: shorten the prompt, or raise cacheBytes (--cache-gb)`,
      );
      expect(refusal({ prompt: text(400, 1) })).toMatch(/^too_large: .*raise cacheBytes \(--cache-gb\)$/);
      expect(refusal({ prompt: [] })).toBeInstanceOf(UsageError);
      expect(refusal({ prompt: [256] })).toEqual(
        new UsageError('prompt: 256 is not a token; the model has the tokens 0 to 255'),
      );
      expect(refusal({ prompt: [1], stop: [''] })).toBeInstanceOf(UsageError);
      expect(refusal({ prompt: [1], sampling: { temperature: -1 } })).toBeInstanceOf(UsageError);
      expect(refusal({ prompt: [1], maxNewTokens: 1.5 })).toBeInstanceOf(UsageError);
    });
  });

  it('are by default a share of the free memory of the device, not of the host', async () => {
    const device = new EmulatedCuda();
    device.freeBytes = () => 2 ** 20;
    const model = tinyModel(sparse.config, 256, 5, { device });
    const engine = createEngine({ ...sparse, model });
    expect(engine.stats().cacheBytes).toBe(2 ** 19);
    await engine.close();
    model.free();
  });

  it('bound the queue by requests and by tokens', async () => {
    const busy = expect.objectContaining({ reason: 'busy' });
    await withEngine(sparse, { maxBatch: 2, maxQueued: 3, maxQueuedTokens: 100 }, async (engine) => {
      const accepted = Array.from({ length: 5 }, () => events(engine, { prompt: [1, 2], maxNewTokens: 3 }));
      await expect(events(engine, { prompt: [1], maxNewTokens: 3 })).rejects.toEqual(busy);
      await Promise.all(accepted);
      const long = events(engine, { prompt: text(99, 1), maxNewTokens: 1 });
      await expect(events(engine, { prompt: text(2, 1), maxNewTokens: 3 })).rejects.toEqual(busy);
      await long;
    });
  });

  it('admit requests only while their longest texts fit: none lacks pages', async () => {
    const one = 300_000;
    await withEngine(sparse, { maxBatch: 50, cacheBytes: one, prefixCacheBytes: 0 }, async (engine) => {
      let most = 0;
      const watch = async (request: EngineRequest) => {
        for await (const _ of engine.submit(request)) {
          most = Math.max(most, engine.stats().running);
          expect(engine.stats().pageBytes).toBeLessThanOrEqual(engine.stats().reservedBytes);
          expect(engine.stats().reservedBytes).toBeLessThanOrEqual(one);
        }
      };
      await Promise.all(
        Array.from({ length: 12 }, (_, i) =>
          watch({ prompt: text(20 + 25 * i, i), maxNewTokens: 30, ignoreSeparator: true }),
        ),
      );
      expect(most).toBeGreaterThan(1);
      expect(most).toBeLessThan(12);
    });
  });
});

describe('cancellation', () => {
  it.each([0, 1, 3, 20])('frees the pages before the next step: after %i events', async (count) => {
    await withEngine(sparse, { prefixCacheBytes: 0 }, async (engine) => {
      let seen = 0;
      for await (const _ of engine.submit({ prompt: text(200, 2), maxNewTokens: 1000 })) if (seen++ === count) break;
      await setImmediate();
      await setImmediate();
      expect(engine.stats()).toMatchObject({ running: 0, waiting: 0, pageBytes: 0, reservedBytes: 0 });
    });
  });

  it('ends a waiting request that is aborted', async () => {
    await withEngine(sparse, { maxBatch: 1 }, async (engine) => {
      const abort = new AbortController();
      const running = events(engine, { prompt: text(50, 1), maxNewTokens: 20 });
      const waiting = events(engine, { prompt: text(50, 2), maxNewTokens: 20, signal: abort.signal });
      abort.abort();
      expect(answer(await waiting)).toMatchObject({ finish: 'aborted', tokens: [] });
      expect(answer(await running).finish).not.toBe('aborted');
    });
  });

  it('closes with requests under way, and refuses new ones', async () => {
    const engine = createEngine(sparse, LIMITS);
    const under = events(engine, { prompt: text(50, 1), maxNewTokens: 1000 });
    await setImmediate();
    await engine.close();
    expect(answer(await under).finish).toBe('aborted');
    expect(() => engine.submit({ prompt: [1] })).toThrow('the engine is closed');
    expect(engine.stats().pageBytes).toBe(0);
  });
});

describe('a request', () => {
  it('reports progress of a long prompt by tiles', async () => {
    await withEngine(sparse, { tile: 100, prefixCacheBytes: 0 }, async (engine) => {
      const all = await events(engine, { prompt: text(250, 1), maxNewTokens: 1 });
      const progress = all.flatMap((event) => (event.type === 'progress' ? [event.processed] : []));
      expect(progress).toEqual([100, 200, 250]);
      expect(all.map(({ type }) => type)).toEqual([...progress.map(() => 'progress'), 'prompt', 'token', 'end']);
    });
  });

  it('gets the log-probabilities of its prompt and of generated tokens', async () => {
    await withEngine(sparse, { tile: 7 }, async (engine) => {
      const prompt = text(30, 4);
      const given = answer(
        await events(engine, { prompt, maxNewTokens: 3, promptLogprobs: 2, logprobs: 3, sampling: { temperature: 0 } }),
      );
      expect(given.prompt.map(({ token }) => token)).toEqual(prompt.slice(1));
      for (const [i, { token, logprob, top }] of given.prompt.entries()) {
        const logits = Array.from(lastLogits(sparse.model, prompt.slice(0, i + 1)));
        const total = Math.log(logits.reduce((sum, x) => sum + Math.exp(x), 0));
        expect(logprob).toBeCloseTo(logits[token] - total, 5);
        const best = [...logits.keys()].sort((a, b) => logits[b] - logits[a] || a - b).slice(0, 2);
        expect(top.map((one) => one.token)).toEqual(best);
      }
      expect(given.logprobs.map((one) => one?.top[0].token)).toEqual(given.tokens);
    });
  });

  it('obeys a token mask, and draws no separator before the minimum', async () => {
    const seen: number[] = [];
    const mask = (): TokenMask => ({
      apply: (logits) => {
        for (let token = 1; token < logits.length; token += 2) logits[token] = Number.NEGATIVE_INFINITY;
      },
      accept: (token) => void seen.push(token),
    });
    await withEngine(sparse, {}, async (engine) => {
      const given = answer(await events(engine, { prompt: text(30, 4), maxNewTokens: 20, minNewTokens: 20, mask }));
      expect(given.tokens).toHaveLength(20);
      expect(given.tokens).toEqual(seen);
      expect(given.tokens.every((token) => token % 2 === 0 && token !== sparse.tokenizer.separator)).toBe(true);
    });
  });

  it('emits whole code points only', async () => {
    const of = source();
    const bytes = [...Buffer.from('aé日🙂', 'utf8')];
    const mask = (): TokenMask => {
      const left = [...bytes];
      return {
        apply: (logits) => {
          logits.fill(Number.NEGATIVE_INFINITY);
          logits[left[0]] = 1;
        },
        accept: () => void left.shift(),
      };
    };
    await withEngine(of, {}, async (engine) => {
      const all = await events(engine, { prompt: [65], maxNewTokens: bytes.length - 1, mask });
      const pieces = all.flatMap((event) => (event.type === 'token' ? [event.text] : []));
      expect(pieces).toEqual(['a', '', 'é', '', '', '日', '', '', '']); // the last character lacks a byte
      expect(answer(all).text).toBe('aé日');
    });
  });

  it('gets a document of its schema, the same under load, and whole when the tokens run out', async () => {
    const schema = {
      type: 'object',
      properties: { story: { type: 'string' }, mood: { enum: ['glad', 'sad'] }, size: { type: 'integer' } },
      required: ['story', 'mood'],
      additionalProperties: false,
    };
    const requests = Array.from({ length: 12 }, (_, seed): EngineRequest => {
      const responseFormat =
        seed % 3 === 0 ? { type: 'json_object' as const } : { type: 'json_schema' as const, schema };
      return { prompt: text(30, seed), maxNewTokens: seed < 8 ? 45 : 1000, sampling: { seed }, responseFormat };
    });
    await withEngine(sparse, { maxBatch: 5, maxContext: 600 }, async (engine) => {
      const together = await Promise.all(requests.map(async (request) => answer(await events(engine, request))));
      for (const [i, request] of requests.entries()) {
        const { text: document, finish, tokens } = together[i];
        const value = JSON.parse(document);
        if (i % 3 === 0) expect(value).toEqual(expect.objectContaining({}));
        else expect(Object.keys(value).slice(0, 2)).toEqual(['story', 'mood']);
        expect(tokens.length).toBeLessThanOrEqual(request.maxNewTokens!);
        expect(['stop', 'length']).toContain(finish);
        expect(answer(await events(engine, request))).toEqual(together[i]);
      }
      expect(new Set(together.map(({ finish }) => finish)).size).toBe(2);
      for (const other of [{ stop: ['x'] }, { minNewTokens: 1 }, { ignoreSeparator: true }])
        expect(() => engine.submit({ ...requests[0], ...other })).toThrow('together with responseFormat');
      expect(() => engine.submit({ ...requests[0], maxNewTokens: 1 })).toThrow('the shortest document has 2 tokens');
    });
  });

  it('fails alone when its mask throws', async () => {
    const broken = () => {
      throw new Error('broken mask');
    };
    const later = (): TokenMask => ({ apply: broken, accept: () => {} });
    await withEngine(sparse, {}, async (engine) => {
      const other = events(engine, { prompt: text(30, 4), maxNewTokens: 5, ignoreSeparator: true });
      for (const mask of [broken, later])
        await expect(events(engine, { prompt: text(30, 5), maxNewTokens: 5, mask })).rejects.toThrow('broken mask');
      expect(answer(await other).tokens).toHaveLength(5);
      expect(engine.failure).toBeNull();
      expect(answer(await events(engine, { prompt: text(9, 1), maxNewTokens: 2, ignoreSeparator: true })).finish).toBe(
        'length',
      );
    });
  });

  it('fails alone when its logits are not finite', async () => {
    const mask = (): TokenMask => ({ apply: (logits) => void logits.fill(Number.NaN), accept: () => {} });
    await withEngine(sparse, {}, async (engine) => {
      const other = events(engine, { prompt: text(30, 4), maxNewTokens: 5, ignoreSeparator: true });
      await expect(events(engine, { prompt: text(30, 5), maxNewTokens: 5, mask })).rejects.toThrow('not sound');
      expect(answer(await other).tokens).toHaveLength(5);
    });
  });
});

describe('on an emulated GPU', () => {
  const shape = { dim: 64, n_heads: 4, n_kv_groups: 2, d_k: 32, d_v: 32 };
  const config = tinyConfig({ model: shape, nsa: { l: 8, d: 4, l_sel: 32, n_sel: 4, w: 50 } });
  const device = new EmulatedCuda({ multiprocessors: 8 });
  const model = tinyModel(config, 256, 5, { device, dtype: 'bf16' });
  models.push(model);
  const gpu: TextSource = { model, config, tokenizer: createTokenizer('byte') };
  const ONE = { tile: 1, idleTile: 1, prefixCacheBytes: 0 }; // prompts token by token: the emulator runs the decode kernels only
  const greedy = (prompt: number[], more: Partial<EngineRequest> = {}): EngineRequest => ({
    prompt,
    maxNewTokens: 12,
    ignoreSeparator: true,
    sampling: { temperature: 0 },
    ...more,
  });

  beforeAll(async () => {
    const engine = createEngine(gpu, { ...LIMITS, ...ONE }); // the weights are cast to bf16 once
    await events(engine, greedy([1]));
    await engine.close();
  });

  it.each<[string, SamplingOptions]>([
    ['greedy', { temperature: 0 }],
    ['sampled', { temperature: 0.9, topK: 100, topP: 0.9, seed: 3 }],
  ])(
    'a %s request is decoded ahead without its logits, and gets the tokens that its logits give',
    async (_, sampling) => {
      const launch = vi.spyOn(DeviceDecoder.prototype, 'launch');
      const logits = vi.spyOn(DeviceDecoder.prototype, 'logitsOf');
      await withEngine(gpu, ONE, async (engine) => {
        const slow = answer(await events(engine, greedy([65, 66], { sampling, logprobs: 0 })));
        expect(logits).toHaveBeenCalledTimes(12);
        expect(launch.mock.calls.filter(([, tokens]) => !tokens)).toHaveLength(0);
        const fast = answer(await events(engine, greedy([65, 66], { sampling })));
        expect(logits).toHaveBeenCalledTimes(12);
        expect(launch.mock.calls.filter(([, tokens]) => !tokens)).toHaveLength(11);
        expect(fast.tokens).toEqual(slow.tokens);
      });
      vi.restoreAllMocks();
    },
  );

  it('a prompt that is repeated after a restart begins its answer with the logits of a file', async () => {
    const folder = mkdtempSync(join(tmpdir(), 'trefoil-engine-'));
    const options = { ...ONE, prefixCacheBytes: 2 ** 30, prefixCacheDir: folder };
    const request = greedy(text(70, 1), { maxNewTokens: 4 });
    const run = () => withEngine(gpu, options, async (engine) => events(engine, request));
    const cold = answer(await run());
    const launch = vi.spyOn(DeviceDecoder.prototype, 'launch');
    const again = await run();
    expect(answer(again)).toEqual(cold);
    expect(again.at(-1)).toMatchObject({ usage: { cachedTokens: 64 } });
    // Five tokens up to the last of the prompt, that one with the first of the answer in a pass, and the other two.
    expect(launch.mock.calls.length).toBeLessThan(12);
    vi.restoreAllMocks();
    rmSync(folder, { recursive: true });
  }, 120_000);

  it('two steps are computed at once: a token that ends the text, and a block that is kept', async () => {
    const prompt = [65, 66];
    let all: number[] = [];
    // Blocks of 64 tokens: the largest page.
    await withEngine(gpu, { ...ONE, prefixCacheBytes: 2 ** 30 }, async (engine) => {
      const started: number[] = [];
      const launch = vi.spyOn(DeviceDecoder.prototype, 'nextLater').mockImplementation(function later(
        this: DeviceDecoder,
      ) {
        started.push(started.length);
        const tokens = this.next();
        return () => {
          unread.push(started.length - read);
          read += 1;
          return tokens;
        };
      });
      let read = 0;
      const unread: number[] = [];
      all = answer(await events(engine, greedy(prompt, { maxNewTokens: 66 }))).tokens;
      expect(Math.max(...unread)).toBe(2);
      launch.mockRestore();
      const again = await events(engine, greedy([...prompt, ...all.slice(0, 63)], { maxNewTokens: 3 }));
      expect(answer(again).tokens).toEqual(all.slice(63));
      expect(again.at(-1)).toMatchObject({ usage: { cachedTokens: 64 } });
    });
    const last = all.findIndex((token, i) => i > 2 && !all.slice(0, i).includes(token));
    await withEngine({ ...gpu, endTokens: [all[last]] }, ONE, async (engine) => {
      const ended = answer(await events(engine, greedy(prompt, { ignoreSeparator: false })));
      expect(ended).toMatchObject({ finish: 'separator', tokens: all.slice(0, last) });
    });
  }, 120_000);

  it('requests join, end early and are cancelled while a step is computed', async () => {
    const requests = [
      greedy([65]),
      greedy([66, 67], { maxNewTokens: 7 }),
      greedy([68], { sampling: { seed: 3 }, maxNewTokens: 5 }),
      greedy([69, 70, 71], { logprobs: 1 }),
    ];
    await withEngine(gpu, ONE, async (engine) => {
      const alone = [];
      for (const request of requests) alone.push(answer(await events(engine, request)));
      const [{ tokens }] = alone;
      const at = tokens.findIndex((token) => token < 128);
      const stop = String.fromCharCode(tokens[at]); // ends a request whose next token is computed already
      const stopped = answer(await events(engine, { ...requests[0], stop: [stop] }));
      expect(stopped).toMatchObject({ finish: 'stop', tokens: tokens.slice(0, at + 1) });
      const together = await Promise.all(
        [...requests, { ...requests[0], stop: [stop] }].map(async (request, i) => {
          for (let wait = 0; wait < 3 * i; wait++) await setImmediate();
          return answer(await events(engine, request));
        }),
      );
      expect(together.map(({ tokens }) => tokens)).toEqual([...alone, stopped].map(({ tokens }) => tokens));
      const abort = new AbortController();
      const seen: number[] = [];
      for await (const event of engine.submit({ ...requests[0], signal: abort.signal }))
        if (event.type === 'token' && seen.push(event.token) === 3) abort.abort();
      expect(seen).toEqual(alone[0].tokens.slice(0, 3));
    });
  });
});
