/** Steps are launched before the host has the tokens that they read, on the emulated GPU, without a change of any text. */
import { afterAll, beforeEach, describe, expect, it, vi } from 'vitest';
import { createTokenizer } from '../../data/tokenizer.js';
import { EmulatedCuda } from '../../testing/emulated-cuda.js';
import { Conversation } from '../chat.js';
import { DeviceDecoder } from '../device-decoder.js';
import { generate, generateAll } from '../generate.js';
import { tinyConfig, tinyModel } from '../testing/tiny-model.js';
import type { GenerateOptions, Generation } from '../texts.js';
import { createEngine } from './create.js';
import { UnusableLogits } from './sampler.js';

const config = tinyConfig({
  model: { dim: 64, n_heads: 4, n_kv_groups: 2, d_k: 32, d_v: 32 },
  nsa: { l: 8, d: 4, l_sel: 32, n_sel: 4, w: 50 },
});
const device = new EmulatedCuda({ multiprocessors: 8 });
const model = tinyModel(config, 256, 5, { device, dtype: 'bf16' });
const tokenizer = createTokenizer('byte');
const source = { model, tokenizer, config };
afterAll(() => model.free());

/** For each step, whether it was launched before the tokens of the one before were read. */
const launches: boolean[] = [];
beforeEach(() => {
  launches.length = 0;
  vi.restoreAllMocks();
  const { launch, nextLater } = DeviceDecoder.prototype;
  let unread = 0;
  vi.spyOn(DeviceDecoder.prototype, 'launch').mockImplementation(function (this: DeviceDecoder, ...values) {
    launches.push(unread > 0);
    launch.apply(this, values);
  });
  vi.spyOn(DeviceDecoder.prototype, 'nextLater').mockImplementation(function (this: DeviceDecoder) {
    unread += 1;
    const tokens = nextLater.call(this);
    return () => {
      unread -= 1;
      return tokens();
    };
  });
});

interface Given extends GenerateOptions {
  readonly endTokens?: readonly number[];
}
const GREEDY = { maxNewTokens: 12, maxContext: 64, sampling: { temperature: 0 } };

async function result<T>(stream: AsyncGenerator<unknown, T>): Promise<T> {
  for (;;) {
    const { done, value } = await stream.next();
    if (done) return value;
  }
}

/** The texts after prompts of one token: the emulator has the kernels of decode steps only. */
function texts(prompts: readonly number[], { endTokens = [], ...options }: Given = {}): Promise<Generation[]> {
  const all = prompts.map((token) => [token]);
  return result(generateAll({ ...source, endTokens }, all, { ...GREEDY, ...options }));
}

/** The same, drawn by the host from the logits of each step. */
async function byHost(prompts: readonly number[], { endTokens = [], ...options }: Given = {}): Promise<Generation[]> {
  const engine = createEngine({ ...source, endTokens }, { maxContext: options.maxContext ?? 64, prefixCacheBytes: 0 });
  const { signal: _, ...request } = options;
  const all = prompts.map(async (token): Promise<Generation> => {
    const tokens: number[] = [];
    for await (const event of engine.submit({ ...GREEDY, ...request, prompt: [token], logprobs: 0 })) {
      if (event.type === 'token') tokens.push(event.token);
      if (event.type === 'end') return { tokens, finishReason: event.finishReason };
    }
    throw new Error('the last event is not the end');
  });
  const results = await Promise.all(all);
  await engine.close();
  return results;
}

describe('greedy texts', () => {
  const prompts = [65, 66, 67];

  it('launch every step but the first ahead, with the tokens that they have otherwise', async () => {
    const logits = vi.spyOn(DeviceDecoder.prototype, 'logitsOf');
    const ahead = await texts(prompts);
    expect(launches).toEqual([false, ...Array.from({ length: 11 }, () => true)]);
    expect(logits).not.toHaveBeenCalled();
    launches.length = 0;
    expect(ahead).toEqual(await byHost(prompts));
    expect(launches).toEqual(Array.from({ length: 12 }, () => false));
    expect(ahead.map(({ finishReason }) => finishReason)).toEqual(['length', 'length', 'length']);
  });

  it('end at different tokens, and their batch shrinks', async () => {
    const later = (await byHost(prompts)).map(({ tokens }) => tokens.slice(2));
    const end = later[1][0];
    const letter = later.flat().find((token) => token < 128);
    if (letter === undefined) throw new Error('no text has a character of one byte');
    const stop = [String.fromCharCode(letter)];
    for (const given of [{ endTokens: [end] }, { stop }, { endTokens: [end], stop }]) {
      const expected = await byHost(prompts, given);
      launches.length = 0;
      expect(await texts(prompts, given)).toEqual(expected);
      expect(launches).toContain(true);
      expect(new Set(expected.map(({ tokens }) => tokens.length)).size).toBeGreaterThan(1);
    }
  });

  it('compute no token beyond the limits', async () => {
    for (const limits of [{ maxNewTokens: 1 }, { maxNewTokens: 2 }, { maxContext: 5 }]) {
      launches.length = 0;
      const [{ tokens }] = await texts([65], limits);
      expect(launches).toHaveLength(tokens.length);
    }
  });

  it('that are left early free everything', async () => {
    const before = device.pool.bytesInUse;
    const stream = generate(source, [65], GREEDY);
    await stream.next();
    await stream.return({ tokens: [], finishReason: 'aborted' });
    expect(launches).toContain(true);
    expect(device.pool.bytesInUse).toBe(before);
  });

  it('report logits that are not finite', async () => {
    const broken = tinyModel(config, 256, 5, { device, dtype: 'bf16' });
    const stream = () => result(generate({ ...source, model: broken }, [65], GREEDY));
    await stream(); // rounded copies of the weights are made at their first use
    const before = device.pool.bytesInUse;
    const [norm] = broken.parameters.filter(({ name }) => /norm/.test(name)).slice(-1);
    norm.value.write(new Float64Array(norm.value.size).fill(Number.NaN));
    launches.length = 0;
    await expect(stream()).rejects.toThrow(UnusableLogits);
    expect(launches).toEqual([false, true]);
    expect(device.pool.bytesInUse).toBe(before);
    broken.free();
  });
});

it('texts that are drawn are drawn on the GPU, with the tokens of the host, a step after the other', async () => {
  const drawn = { sampling: { temperature: 0.9, topP: 0.9, seed: 4 }, maxNewTokens: 6 };
  const logits = vi.spyOn(DeviceDecoder.prototype, 'logitsOf');
  const onDevice = await texts([65, 66], drawn);
  expect(logits).not.toHaveBeenCalled();
  expect(launches).not.toContain(true);
  expect(onDevice).toEqual(await byHost([65, 66], drawn));
  expect(onDevice[0]).not.toEqual(onDevice[1]);
});

it('a conversation keeps pages without a token that ended a turn', async () => {
  // Token by token, as the emulator reads.
  const single = { ...source, config: { ...config, runtime: { ...config.runtime, prefill_tile: 1 } } };
  const [{ tokens }] = await texts([65]);
  const ends = { ...single, endTokens: [tokens[5]] };
  const talk = new Conversation(ends, GREEDY);
  const first = await result(talk.continue([65]));
  expect(first).toEqual({ tokens: tokens.slice(0, tokens.indexOf(tokens[5])), finishReason: 'separator' });
  const context = [65, ...first.tokens, 70, 71];
  launches.length = 0;
  const second = await result(talk.continue(context));
  // The two new tokens, and each token that was drawn, unless it was the last that was wanted.
  expect(launches).toHaveLength(2 + second.tokens.length - (second.finishReason === 'length' ? 1 : 0));
  expect(second).toEqual(await result(generate(ends, context, GREEDY)));
  await talk.free();
});
