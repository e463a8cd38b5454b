import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { createTokenizer, type Tokenizer } from '../data/tokenizer.js';
import { UsageError } from '../errors.js';
import type { LanguageModel } from '../model/language-model.js';
import { cpu } from '../testing/devices.js';
import { expectSameForAnyThreadCount } from '../testing/same-bytes.js';
import { lastLogits } from './decode.js';
import { createSampler, UnusableLogits } from './engine/sampler.js';
import { generate, generateAll } from './generate.js';
import { countingReads, tinyConfig, tinyModel } from './testing/tiny-model.js';
import type { GenerateOptions, Generation } from './texts.js';

const config = tinyConfig();
const tokenizer = createTokenizer('byte');
const model = tinyModel(config);
const loaded = { model, tokenizer, config };
afterAll(() => model.free());

interface Run extends Generation {
  pieces: string[];
  text: string;
}

async function run(
  options: Partial<GenerateOptions>,
  prompt = 'Once',
  from: { model: LanguageModel; tokenizer: Tokenizer; config: typeof config } = loaded,
): Promise<Run> {
  const stream = generate(from, prompt, { maxNewTokens: 24, ...options });
  const pieces: string[] = [];
  for (;;) {
    const { done, value } = await stream.next();
    if (done) return { ...value, pieces, text: pieces.join('') };
    pieces.push(value);
  }
}

/** A model that always draws `script`: its tokenizer counts how far it is. */
async function scripted(script: readonly number[], options: Partial<GenerateOptions> = {}): Promise<Run> {
  let at = 0;
  const shape = { ...model.shape, vocabSize: 256 };
  const fake = {
    device: cpu(),
    dtype: 'f32',
    shape,
    logits: (tape: { from(values: number[], shape: number[]): unknown }) => {
      const logits = new Array<number>(256).fill(0);
      logits[script[at++]] = 9;
      return tape.from(logits, [1, 256]);
    },
  } as unknown as LanguageModel;
  return run({ sampling: { temperature: 0 }, maxNewTokens: script.length, ...options }, 'go', {
    ...loaded,
    model: fake,
  });
}

const bytes = (text: string) => [...Buffer.from(text)];

describe('generation', () => {
  it('greedy is the loop of the most probable token', async () => {
    const { tokens, finishReason } = await run({ sampling: { temperature: 0 } });
    const context = bytes('Once');
    for (const token of tokens) {
      const logits = lastLogits(model, context);
      expect(token).toBe(logits.indexOf(Math.max(...logits)));
      context.push(token);
    }
    expect(finishReason === 'separator' || tokens.length === 24).toBe(true);
  });

  it('writes documents of a schema, greedy or not, and whole when the tokens run out', async () => {
    const schema = { type: 'object', properties: { a: { type: 'string' } }, required: ['a'] };
    const responseFormat = { type: 'json_schema' as const, schema };
    for (const sampling of [{ temperature: 0 }, { seed: 1 }, { seed: 2 }]) {
      const { text, finishReason, tokens } = await run({ sampling, responseFormat, maxNewTokens: 30 });
      expect(Object.keys(JSON.parse(text))).toEqual(['a']);
      expect(finishReason).toBe(tokens.length === 30 ? 'length' : 'stop');
    }
    await expect(run({ responseFormat, stop: ['x'] })).rejects.toThrow('together with responseFormat');
    await expect(run({ responseFormat, maxNewTokens: 7 })).rejects.toThrow('the shortest document has 8 tokens');
  });

  it('draws what the sampler draws from the logits of the whole context', async () => {
    const sampling = { temperature: 1.3, topK: 50, topP: 0.95, seed: 8 };
    const { tokens, text } = await run({ sampling });
    const sample = createSampler(sampling);
    const context = bytes('Once');
    tokens.forEach((token, i) => {
      expect(token).toBe(sample(lastLogits(model, context), i));
      context.push(token);
    });
    expect(tokens.length).toBeGreaterThan(3);
    const whole = (shown: string) => shown.replace(/\uFFFD+$/, '');
    expect(whole(text)).toBe(whole(tokenizer.decode(tokens)));
  });

  it('of several prompts at once is that of each alone', async () => {
    const prompts = ['Once', 'a much longer prompt than the others, beyond every window', '', 'x'];
    const options = {
      maxNewTokens: 24,
      sampling: { temperature: 1.2, seed: 3, repetitionPenalty: 1.3 },
      maxContext: 64,
    };
    const texts = prompts.map(() => '');
    const stream = generateAll(loaded, prompts, options);
    let results: Generation[] | null = null;
    while (results === null) {
      const { done, value } = await stream.next();
      if (done) results = value;
      else texts[value.index] += value.text;
    }
    for (const [i, prompt] of prompts.entries()) {
      const alone = await run(options, prompt);
      expect(texts[i]).toBe(alone.text);
      expect(results[i]).toEqual({ tokens: alone.tokens, finishReason: alone.finishReason });
    }
    expect(new Set(results.map(({ tokens }) => tokens.length)).size).toBeGreaterThan(1); // they end at different times
  });

  it('draws the same in tiles, token by token, and by the slow loop', async () => {
    const sampling = { temperature: 1.1, seed: 5, minP: 0.01 };
    const prompt = 'a prompt that is longer than windows and blocks of this small model';
    const wanted = await run({ sampling }, prompt);
    for (const runtime of [{ prefill_tile: 8 }, { prefill_tile: 1 }, { selection_kernel: 'reference' as const }]) {
      const from = { ...loaded, config: { ...config, runtime: { ...config.runtime, ...runtime } } };
      expect(await run({ sampling }, prompt, from)).toEqual(wanted);
    }
  });

  it('reads every token once', async () => {
    const { model: counting, lengths } = countingReads(model);
    const { tokens } = await run({ sampling: { seed: 6 }, maxNewTokens: 5 }, 'Once upon', {
      ...loaded,
      model: counting,
    });
    expect(tokens).toHaveLength(5);
    expect(lengths).toEqual([9, 1, 1, 1, 1]);
  });

  it('reads of a known prompt what is not in its files, and draws the same', async () => {
    const folder = mkdtempSync(join(tmpdir(), 'trefoil-generate-'));
    const prompt = 'a prompt of many words. '.repeat(30);
    const options = { sampling: { seed: 6 }, maxNewTokens: 5 };
    const expected = await run(options, prompt);
    for (const longest of [256, prompt.length % 256]) {
      const { model: counting, lengths } = countingReads(model);
      const known = await run({ ...options, prefixCacheDir: folder }, prompt, { ...loaded, model: counting });
      expect(known).toEqual(expected);
      expect(Math.max(...lengths)).toBeLessThanOrEqual(longest);
    }
    rmSync(folder, { recursive: true });
  });

  it('draws the same with speculation, in fewer passes', async () => {
    const repeating = tinyModel(tinyConfig({ nsa: { w: 70 } }));
    const prompt = 'tick tock tick tock tick tock tick tock';
    const passes: number[] = [];
    const texts = [];
    for (const speculate of [0, 6]) {
      const { model: counting, lengths } = countingReads(repeating);
      const options = { sampling: { temperature: 0 }, maxNewTokens: 60, speculate };
      texts.push(await run(options, prompt, { ...loaded, model: counting }));
      passes.push(lengths.length);
    }
    repeating.free();
    expect(texts[1].tokens).toEqual(texts[0].tokens);
    expect(texts[1].text).toBe(texts[0].text);
    expect(passes[1]).toBeLessThan(passes[0]);
  });

  it('is the same for a seed and another for another', async () => {
    const [once, again, other] = [
      await run({ sampling: { seed: 1 } }),
      await run({ sampling: { seed: 1 } }),
      await run({ sampling: { seed: 2 } }),
    ];
    expect(again).toEqual(once);
    expect(other.tokens).not.toEqual(once.tokens);
  });

  it('is independent of the number of threads', () => {
    const context = Array.from({ length: 70 }, (_, i) => (i * 91) % 256);
    expectSameForAnyThreadCount(() => [new Uint8Array(lastLogits(model, context).buffer)]);
  });

  it('sees tokens beyond window, selection and the first blocks, from a context of one on', () => {
    for (const length of [1, 3, 4, 7, 33]) {
      const context = Array.from({ length }, (_, i) => (i * 91) % 256);
      expect(lastLogits(model, context).every(Number.isFinite)).toBe(true);
    }
  });

  it('keeps no memory', async () => {
    await run({});
    const before = cpu().pool.bytesInUse;
    await run({ maxNewTokens: 40 });
    expect(cpu().pool.bytesInUse).toBe(before);
    const stream = generate(loaded, 'left early', { maxNewTokens: 5 });
    await stream.next();
    await stream.return({ tokens: [], finishReason: 'length' });
    expect(cpu().pool.bytesInUse).toBe(before);
  });

  it('an empty prompt starts behind a separator', async () => {
    const { tokens } = await run({ sampling: { temperature: 0 } }, '');
    const logits = lastLogits(model, [tokenizer.separator]);
    const best = logits.indexOf(Math.max(...logits));
    expect(tokens[0] ?? tokenizer.separator).toBe(best);
  });

  it('never draws a row of the embedding that no token has', async () => {
    const padded = tinyConfig({ model: { vocab_size: 4000 } });
    const from = { ...loaded, config: padded, model: tinyModel(padded) };
    const { tokens } = await run({ sampling: { temperature: 50, seed: 4 }, maxNewTokens: 40 }, 'x', from);
    from.model.free();
    expect(tokens.length).toBeGreaterThan(5);
    expect(Math.max(...tokens)).toBeLessThan(256);
  });
});

describe('the end', () => {
  it('by length', async () => {
    expect(await scripted(bytes('abc'))).toMatchObject({ text: 'abc', tokens: bytes('abc'), finishReason: 'length' });
  });

  it('by the separator, which is no part of the text', async () => {
    const done = await scripted([...bytes('ab'), 0, ...bytes('c')]);
    expect(done).toMatchObject({ text: 'ab', tokens: bytes('ab'), finishReason: 'separator' });
    expect(await scripted([0])).toMatchObject({ text: '', tokens: [], finishReason: 'separator', pieces: [] });
  });

  it('by a stop string, wherever tokens cut it', async () => {
    const done = await scripted(bytes('one END two'), { stop: ['nothing', 'END'] });
    expect(done).toMatchObject({ text: 'one ', tokens: bytes('one END'), finishReason: 'stop' });
    const held = await scripted(bytes('one EN'), { stop: ['END'] });
    expect(held).toMatchObject({ text: 'one EN', finishReason: 'length' });
    const separated = await scripted([...bytes('one EN'), 0], { stop: ['END'] });
    expect(separated).toMatchObject({ text: 'one EN', finishReason: 'separator' });
  });

  it('by a full context', async () => {
    const done = await scripted(bytes('abcdef'), { maxContext: 5 }); // the prompt has 2
    expect(done).toMatchObject({ text: 'abc', finishReason: 'context' });
  });

  it('a prompt that fills the context is refused with both numbers', async () => {
    await expect(run({ maxContext: 4 })).rejects.toThrow(UsageError);
    await expect(run({ maxContext: 4 })).rejects.toThrow(
      'the prompt has 4 tokens; at most 3 fit: shorten the prompt, or raise maxContext (--max-context)',
    );
  });
});

describe('text', () => {
  it('comes in whole characters', async () => {
    const done = await scripted(bytes('aé€😀z'));
    expect(done.pieces).toEqual(['a', 'é', '€', '😀', 'z']);
  });

  it('leaves out a character that was cut off at the end', async () => {
    const done = await scripted(bytes('ok😀').slice(0, -1));
    expect(done).toMatchObject({ text: 'ok', finishReason: 'length' });
    expect(done.tokens).toHaveLength(5);
  });

  it('shows bytes that are no text as such and goes on', async () => {
    expect((await scripted([...bytes('a'), 0xff, ...bytes('b')])).text).toBe('a\uFFFDb');
  });
});

describe('refusals', () => {
  it.each<[Partial<GenerateOptions>, string]>([
    [{ maxNewTokens: 0 }, 'max-new-tokens: 0 is not allowed'],
    [{ maxNewTokens: 1.5 }, 'max-new-tokens: 1.5'],
    [{ maxContext: Number.NaN }, 'max-context: NaN'],
    [{ stop: ['a', ''] }, 'stop: an empty text'],
    [{ sampling: { topP: 2 } }, 'top-p: 2'],
  ])('%j', async (options, message) => {
    await expect(run(options)).rejects.toThrow(UsageError);
    await expect(run(options)).rejects.toThrow(message);
  });

  it('a prompt beyond the vocabulary of the model', async () => {
    const small = tinyModel(config, 40);
    const from = { ...loaded, model: small };
    await expect(run({}, 'hello', from)).rejects.toThrow(
      'the prompt holds token 104 of tokenizer byte, but the model has 40 tokens',
    );
    await expect(run({ maxNewTokens: 2 }, '', from)).resolves.toBeDefined();
    small.free();
  });

  it('a model with NaN in its weights', async () => {
    const broken = tinyModel(config);
    broken.parameters[0].value.write(broken.parameters[0].value.read().fill(Number.NaN));
    const before = cpu().pool.bytesInUse;
    await expect(run({}, 'x', { ...loaded, model: broken })).rejects.toThrow(UnusableLogits);
    expect(cpu().pool.bytesInUse).toBe(before);
    broken.free();
  });
});
