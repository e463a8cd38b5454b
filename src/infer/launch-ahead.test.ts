/** Greedy generation launches the step after a token before the host has that token, on the emulated GPU. */
import { afterAll, beforeEach, describe, expect, it, vi } from 'vitest';
import { createTokenizer } from '../data/tokenizer.js';
import { EmulatedCuda } from '../testing/emulated-cuda.js';
import { contextReader } from './decode.js';
import { DeviceDecoder } from './device-decoder.js';
import { type ExtendOptions, extend, GeneratedSequence, StopFilter } from './generate.js';
import { UnusableLogits } from './sampler.js';
import { tinyConfig, tinyModel } from './testing/tiny-model.js';

const config = tinyConfig({
  model: { dim: 64, n_heads: 4, n_kv_groups: 2, d_k: 32, d_v: 32 },
  nsa: { l: 8, d: 4, l_sel: 32, n_sel: 4, w: 50 },
});
const device = new EmulatedCuda({ multiprocessors: 8 });
const model = tinyModel(config, 256, 5, { device, dtype: 'bf16' });
const tokenizer = createTokenizer('byte');
afterAll(() => model.free());

/** Whether each step was launched before the tokens of the one before were read. */
const launches: boolean[] = [];
beforeEach(() => {
  launches.length = 0;
  vi.restoreAllMocks();
  const { launch } = DeviceDecoder.prototype;
  vi.spyOn(DeviceDecoder.prototype, 'launch').mockImplementation(function (this: DeviceDecoder, ...values) {
    launches.push(!values[1]);
    launch.apply(this, values);
  });
});

/** The texts after prompts of one token: the emulator has the kernels of decode steps only. */
async function texts(prompts: readonly number[], options: Partial<ExtendOptions> = {}, stop: readonly string[] = []) {
  const reader = contextReader(model, config, 256);
  const sequences = prompts.map(
    (token, i) => new GeneratedSequence(i, [token], tokenizer.createStreamDecoder(), new StopFilter(stop)),
  );
  const limits = { maxNewTokens: 12, maxContext: 64 };
  const given = { tokenizer, vocabulary: 256, sampling: { temperature: 0 }, ...limits, ...options };
  try {
    for await (const _ of extend(reader, sequences, given));
  } finally {
    reader.free();
  }
  return sequences.map(({ tokens, finishReason }) => ({ tokens, finishReason }));
}

describe('greedy generation', () => {
  const prompts = [65, 66, 67];

  it('launches every step but the first ahead, with the tokens that it has otherwise', async () => {
    const waited = await texts(prompts);
    expect(launches).toEqual(Array.from({ length: 12 }, () => false));
    launches.length = 0;
    const ahead = await texts(prompts, { endsForGood: true });
    expect(launches).toEqual([false, ...Array.from({ length: 11 }, () => true)]);
    expect(ahead).toEqual(waited);
    expect(ahead.map(({ finishReason }) => finishReason)).toEqual(['length', 'length', 'length']);
  });

  it('ends texts at different tokens, whose batch shrinks', async () => {
    const later = (await texts(prompts)).map(({ tokens }) => tokens.slice(2));
    const end = later[1][0];
    const letter = later.flat().find((token) => token < 128);
    if (letter === undefined) throw new Error('no text has a character of one byte');
    const stop = String.fromCharCode(letter);
    const cases: [endTokens: number[], stop: string[]][] = [
      [[end], []],
      [[], [stop]],
      [[end], [stop]],
    ];
    for (const [endTokens, stops] of cases) {
      const waited = await texts(prompts, { endTokens }, stops);
      const ahead = await texts(prompts, { endTokens, endsForGood: true }, stops);
      expect(ahead).toEqual(waited);
      expect(new Set(waited.map(({ tokens }) => tokens.length)).size).toBeGreaterThan(1);
    }
    expect(launches).toContain(true);
  });

  it('computes no token beyond the limits', async () => {
    for (const limits of [{ maxNewTokens: 1 }, { maxNewTokens: 2 }, { maxContext: 5 }]) {
      launches.length = 0;
      const [{ tokens }] = await texts([65], { endsForGood: true, ...limits });
      expect(launches).toHaveLength(tokens.length);
    }
  });

  it('waits for tokens that are drawn', async () => {
    await texts(prompts, { endsForGood: true, sampling: { temperature: 1, seed: 3 } });
    expect(launches).not.toContain(true);
  });

  it('reports logits that are not finite', async () => {
    const broken = tinyModel(config, 256, 5, { device, dtype: 'bf16' });
    const [norm] = broken.parameters.filter(({ name }) => /norm/.test(name)).slice(-1);
    norm.value.write(new Float64Array(norm.value.size).fill(Number.NaN));
    const reader = contextReader(broken, config, 256);
    const scores = reader.next([[65]], null, true);
    expect(scores.chosen?.()[0]).toBeLessThan(0);
    expect(() => scores.logits()).toThrow(UnusableLogits);
    reader.free();
    broken.free();
  });
});
