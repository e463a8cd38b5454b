/** Speculative decoding: drafts from the text, passes whose last tokens are taken back, and the engine with both. */
import { afterAll, describe, expect, it } from 'vitest';
import { HERMES } from '../../data/answer-form.js';
import { createTokenizer } from '../../data/tokenizer.js';
import { UsageError } from '../../errors.js';
import { DecodeCache } from '../../model/cache.js';
import type { LanguageModel } from '../../model/language-model.js';
import { EmulatedCuda } from '../../testing/emulated-cuda.js';
import { prefill, readRows } from '../decode.js';
import type { ToolCalls } from '../structured/calls.js';
import { tinyConfig, tinyModel } from '../testing/tiny-model.js';
import type { TextSource } from '../text-source.js';
import { createEngine } from './create.js';
import { PromptLookup } from './drafts.js';
import type { EngineOptions } from './interface.js';
import type { EngineEvent, EngineRequest, TokenMask } from './request.js';

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
const text = (length: number, seed: number) =>
  Array.from({ length }, (_, i) => (i * i * 7 + i * 91 * seed + seed) % 256);

/** Deterministic integers below `most`. */
function integers(seed: number): (most: number) => number {
  let state = seed * 2654435761 + 1;
  return (most) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * most);
  };
}

const VARIANTS: [string, Parameters<typeof tinyConfig>[0]][] = [
  ['sparse', { nsa: { w: 70, n_sel: 5 } }],
  ['conv, rotated before, window of 6', { nsa: { phi: 'conv', cmp_rope: 'before', l: 8, d: 4 } }],
  ['mlp', { nsa: { phi: 'mlp', gate: 'sigmoid' } }],
  ['dense', { model: { attention: 'dense' } }],
  ['shared keys and values', { nsa: { shared_kv: true, w: 70 } }],
];

describe('drafts', () => {
  const next = (context: number[], count = 6, most = 6) => new PromptLookup(context, most).next(count);

  it('are what followed the last occurrence of the last tokens', () => {
    expect(next([1, 2, 3, 4, 5, 9, 1, 2, 3, 7, 8, 1, 2, 3])).toEqual([7, 8, 1, 2, 3, 7]);
    expect(next([1, 2, 3, 4, 5, 1, 2, 3], 2)).toEqual([4, 5]);
    expect(next([1, 2, 3, 4, 5, 1, 2, 3], 0)).toEqual([]);
    expect(next([1, 2, 3, 4, 5, 2, 3])).toEqual([]);
    expect(next([1, 2])).toEqual([]);
    // A longer match wins over a more recent one.
    const long = [1, 2, 3, 4, 5, 6, 7, 8];
    expect(next([...long, 50, 51, 0, 6, 7, 8, 60, 61, 0, ...long], 2)).toEqual([50, 51]);
  });

  it('continue a short period', () => {
    expect(next([5, 5, 5, 5], 4)).toEqual([5, 5, 5, 5]);
    expect(next([1, 2, 1, 2, 1, 2], 5)).toEqual([1, 2, 1, 2, 1]);
  });

  it('follow a text that grows, become shorter and pause when they are wrong', () => {
    const context = [1, 2, 3, 4, 5, 6, 1, 2, 3];
    const lookup = new PromptLookup(context, 4);
    expect(lookup.next(10)).toEqual([4, 5, 6, 1]);
    lookup.checked(4, 2);
    context.push(4, 5, 9, 1, 2, 3);
    expect(lookup.next(10)).toEqual([4, 5]);
    lookup.checked(2, 0);
    expect(lookup.next(10)).toEqual([]);
    context.push(4, 5);
    expect(lookup.next(10)).toEqual([9]);
    lookup.checked(1, 1);
    context.push(9, 1, 2);
    expect(lookup.next(10)).toHaveLength(2);
  });
});

describe('a pass whose last tokens are taken back', () => {
  it.each(VARIANTS)('leaves the cache as if it had not read them, bit for bit: %s', (_, sections) => {
    const { model } = source(sections);
    const pick = integers(3);
    const cache = new DecodeCache(model.device, model.shape, model.dtype, 9);
    const plain = new DecodeCache(model.device, model.shape, model.dtype);
    const [speculated, reference] = [cache.sequence(), plain.sequence()];
    const tokens = text(900, 4);
    let length = 150;
    for (const sequence of [speculated, reference]) prefill(model, [sequence], [tokens.slice(0, length)], 64);
    let forks = 0;
    while (length < 600) {
      const drafts = pick(10);
      const right = pick(drafts + 1);
      const guess = tokens
        .slice(length + 1, length + 1 + drafts)
        .map((token, i) => (i < right ? token : (token + 1) % 256));
      const read = [tokens[length], ...guess];
      // A fork shares pages: what is taken back must not show in the other.
      const fork = pick(4) === 0 ? speculated.fork() : null;
      const rows = readRows(
        model,
        [speculated],
        [read],
        read.map((_, i) => i),
        { drafts: [drafts] },
      );
      for (let i = 0; i <= right; i++) {
        const [logits] = readRows(model, [reference], [[tokens[length + i]]], [0]);
        expect(rows[i], `token ${length + i}`).toEqual(logits);
      }
      if (fork) {
        forks += 1;
        const [logits] = readRows(model, [fork], [[tokens[length]]], [0]);
        expect(logits).toEqual(rows[0]);
        fork.free();
      }
      length += 1 + right;
      speculated.truncate(length);
    }
    expect(forks).toBeGreaterThan(3);
    expect(() => speculated.truncate(speculated.settled - 1)).toThrow('cannot have');
    for (const sequence of [speculated, reference]) sequence.free();
    expect([cache.bytes, plain.bytes]).toEqual([0, 0]);
  });
});

const LIMITS = { cacheBytes: 2 ** 26, prefixCacheBytes: 2 ** 24, tile: 64 };

async function answers(of: TextSource, requests: readonly EngineRequest[], options: EngineOptions) {
  const before = of.model.device.pool.bytesInUse;
  const engine = createEngine(of, { ...LIMITS, ...options });
  const all = await Promise.all(
    requests.map(async (request) => {
      const events: EngineEvent[] = [];
      for await (const event of engine.submit(request)) if (event.type !== 'progress') events.push(event);
      return events.map((event) => (event.type === 'end' ? { ...event, usage: event.usage.newTokens } : event));
    }),
  );
  await engine.close();
  expect(of.model.device.pool.bytesInUse).toBe(before);
  return { all, stats: engine.stats() };
}

/** Lets only the tokens of `cycle` be drawn, in turn: a text that repeats itself. */
const cyclic =
  (cycle: readonly number[], from = 0) =>
  (): TokenMask => {
    let at = from;
    return {
      apply: (logits) => {
        const kept = logits[cycle[at % cycle.length]];
        logits.fill(Number.NEGATIVE_INFINITY);
        logits[cycle[at % cycle.length]] = kept;
      },
      accept: () => {
        at += 1;
      },
    };
  };

const CALLS: ToolCalls = {
  type: 'tool_calls',
  form: { calls: HERMES, reasoning: null },
  tools: [{ name: 'f', schema: { type: 'object', properties: { a: { type: 'string' } } } }],
  ...{ isRequired: true, isParallel: true, document: null },
};
const SHIFTS = [{}, { frequencyPenalty: 0.8 }, { presencePenalty: 1, logitBias: { 101: -100, 32: 3 } }, {}];

describe('an engine that speculates', () => {
  it.each(VARIANTS)('gives the same tokens, texts and log-probabilities: %s', async (_, sections) => {
    const of = source(sections);
    const pick = integers(5);
    const requests = Array.from({ length: 14 }, (_, i): EngineRequest => {
      const phrase = text(5 + pick(30), i);
      const prompt = [...phrase, ...phrase, ...phrase.slice(0, 1 + pick(phrase.length)), ...text(pick(3), 9)];
      return {
        prompt,
        maxNewTokens: 1 + pick(90),
        ignoreSeparator: i % 3 > 0,
        stop: i % 4 === 0 ? ['e', 'ab'] : [],
        minNewTokens: pick(5),
        ...(i % 2 ? { logprobs: 2 } : {}),
        ...(i % 5 === 2 ? { mask: cyclic(text(7, i)) } : {}),
        ...(i % 5 === 3 ? { maxNewTokens: 90, minNewTokens: 0, ignoreSeparator: false, responseFormat: CALLS } : {}),
        sampling: {
          temperature: i % 3 === 0 ? 0 : 0.4,
          seed: i,
          repetitionPenalty: i % 6 === 1 ? 1.2 : 1,
          ...SHIFTS[i % 4],
        },
      };
    });
    const plain = await answers(of, requests, {});
    expect(plain.stats).toMatchObject({ draftTokens: 0, acceptedTokens: 0 });
    for (const options of [{ speculate: 8 }, { speculate: 3, maxBatch: 3, tile: 5 }]) {
      const { all, stats } = await answers(of, requests, options);
      expect(all).toEqual(plain.all);
      expect(stats.acceptedTokens).toBeGreaterThan(20);
      expect(stats.draftTokens).toBeGreaterThan(stats.acceptedTokens);
    }
  });

  it('needs fewer steps for a text that repeats itself, and keeps its prefixes', async () => {
    const of = source();
    const request = { prompt: text(40, 2), maxNewTokens: 400, mask: cyclic(text(9, 3)) };
    const { stats } = await answers(of, [request], { speculate: 8, tile: 128 });
    expect(stats.acceptedTokens).toBeGreaterThan(300);
    const engine = createEngine(of, { ...LIMITS, speculate: 8, tile: 128 });
    const generated: number[] = [];
    const cached: number[] = [];
    for (const prompt of [request.prompt, null]) {
      const one = { ...request, prompt: prompt ?? [...request.prompt, ...generated], maxNewTokens: prompt ? 400 : 1 };
      for await (const event of engine.submit(one)) {
        if (event.type === 'token') generated.push(event.token);
        if (event.type === 'end') cached.push(event.usage.cachedTokens);
      }
    }
    expect(cached).toEqual([0, 384]);
    await engine.close();
  });

  it('refuses CUDA and wrong numbers by name', () => {
    const of = source();
    expect(() => createEngine(of, { speculate: 1.5 })).toThrow(
      new UsageError('speculate: 1.5 is not allowed; use an integer of at least 0'),
    );
    const device = new EmulatedCuda();
    const model = tinyModel(of.config, 256, 5, { device });
    expect(() => createEngine({ ...of, model }, { speculate: 4 })).toThrow('speculate: only on the CPU');
    model.free();
  });
});
