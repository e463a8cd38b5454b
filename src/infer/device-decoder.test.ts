/** Decoding by replaying a graph against reading everything again: on a GPU, in bf16. */
import { afterAll, describe, expect, it } from 'vitest';
import { createTokenizer } from '../data/tokenizer.js';
import { cudaAbsence } from '../device/cuda/cuda.js';
import { type CachedSequence, cacheBytes, DecodeCache, predictedReads } from '../model/cache.js';
import type { LanguageModel } from '../model/language-model.js';
import { cpu, cuda } from '../testing/devices.js';
import { relativeError } from '../testing/numbers.js';
import { lastLogits } from './context-reader.js';
import { prefill } from './decode.js';
import { DeviceDecoder, deviceDecoderRefusal } from './device-decoder.js';
import { generate } from './generate.js';
import { tinyConfig, tinyModel } from './testing/tiny-model.js';

const absence = cudaAbsence();
const onGpu = (name: string, body: () => void | Promise<void>) =>
  it(name, async (context) => {
    if (absence) return context.skip(absence);
    await body();
  });

type Sections = NonNullable<Parameters<typeof tinyConfig>[0]>;
/** A shape that the fused step takes, with more blocks than slots after 160 tokens. */
const MODEL = { dim: 64, n_heads: 4, n_kv_groups: 2, d_k: 32, d_v: 32 };
const NSA = { l: 8, d: 4, l_sel: 32, n_sel: 5, w: 50 };
/** Small models: the fused kernels of a prefill would take longer to compile than everything else here. */
const PLAIN = { fusedFrom: Number.POSITIVE_INFINITY };
/** bf16 rounds every layer's result, and a near tie may select another block. */
const LIMIT = 5e-2;

const models: LanguageModel[] = [];
afterAll(() => {
  for (const model of models) model.free();
});

function configOf({ model, nsa }: Sections = {}) {
  return tinyConfig({ model: { ...MODEL, ...model }, nsa: { ...NSA, ...nsa } });
}

function made(sections: Sections = {}): LanguageModel {
  const model = tinyModel(configOf(sections), 256, 5, { device: cuda(), dtype: 'bf16' });
  models.push(model);
  lastLogits(model, [1], PLAIN);
  return model;
}

function text(length: number, seed = 1): number[] {
  return Array.from({ length }, (_, i) => (i * i * 7 + i * 91 * seed + seed) % 256);
}

function withDecoder(
  model: LanguageModel,
  body: (decoder: DeviceDecoder, make: () => CachedSequence, cache: DecodeCache) => void,
  options: ConstructorParameters<typeof DeviceDecoder>[2] = {},
): void {
  const cache = new DecodeCache(model.device, model.shape, model.dtype);
  const decoder = new DeviceDecoder(model, cache, options);
  const sequences: CachedSequence[] = [];
  const before = model.device.pool.bytesInUse;
  body(
    decoder,
    () => {
      const sequence = cache.sequence();
      sequences.push(sequence);
      return sequence;
    },
    cache,
  );
  decoder.free();
  for (const sequence of sequences) sequence.free();
  expect(cache.bytes).toBe(0);
  expect(model.device.pool.bytesInUse).toBe(before);
}

const VARIANTS: Record<string, Sections> = {
  avg: {},
  conv: { nsa: { phi: 'conv', cmp_rope: 'before', gate: 'sigmoid' } },
  'scaled positions, tied, swiglu': { model: { rope_scale: 2, tie_embeddings: true, mlp: 'swiglu' } },
  'no rotation of compressed keys, 6 heads a group': { model: { n_heads: 12, d_k: 64 }, nsa: { cmp_rope: 'none' } },
  'one branch': { nsa: { force_branch: 'cmp' } },
  'every block': { nsa: { n_sel: 20 } },
  dense: { model: { attention: 'dense' } },
};

describe('a graph for every token', () => {
  for (const [name, sections] of Object.entries(VARIANTS))
    onGpu(`gives the logits of a prefill: ${name}`, () => {
      const model = made(sections);
      expect(deviceDecoderRefusal(model)).toBeNull();
      const tokens = text(330);
      const exact = tinyModel(configOf(sections));
      models.push(exact);
      for (const split of [1, 7, 32, 63, 64, 150, 200])
        withDecoder(model, (decoder, make) => {
          const sequence = make();
          prefill(model, [sequence], [tokens.slice(0, split)], null, { kernels: PLAIN });
          for (let at = split; at < tokens.length; at++) {
            decoder.launch([sequence], [tokens[at]]);
            const isChecked = at < split + 3 || [31, 32, 63, 64, 65, 127, 128, 160, 161, 192, 329].includes(at);
            if (!isChecked) continue;
            const [logits] = decoder.logits();
            const where = `split ${split}, token ${at}`;
            expect(relativeError(logits, lastLogits(model, tokens.slice(0, at + 1), PLAIN)), where).toBeLessThan(LIMIT);
            if (split === 1)
              expect(
                relativeError(logits, lastLogits(exact, tokens.slice(0, at + 1), PLAIN)),
                `${where}, CPU`,
              ).toBeLessThan(2 * LIMIT);
          }
          expect(sequence.length).toBe(tokens.length);
        });
    });

  onGpu('of a batch equals each sequence alone, and launching every kernel equals the replay', () => {
    const model = made();
    const prompts = [1, 30, 64, 200, 131].map((length, i) => text(length, i + 1));
    const steps = 40;
    const run = (rows: readonly number[], graph: boolean) => {
      const results: Float32Array[][] = [];
      withDecoder(
        model,
        (decoder, make) => {
          const sequences = rows.map(make);
          prefill(
            model,
            sequences,
            rows.map((row) => prompts[row]),
            null,
            { kernels: PLAIN },
          );
          for (let i = 0; i < steps; i++) {
            decoder.launch(
              sequences,
              rows.map((row) => (i * 37 + row * 11) % 256),
            );
            results.push(decoder.logits().map((logits) => logits.slice()));
          }
        },
        { graph },
      );
      return results;
    };
    const all = prompts.map((_, row) => row);
    const together = run(all, true);
    expect(run(all, false)).toEqual(together);
    for (const row of all) {
      const alone = run([row], true);
      alone.forEach(([logits], i) => {
        expect(relativeError(logits, together[i][row]), `row ${row}, step ${i}`).toBeLessThan(LIMIT);
      });
    }
  });

  onGpu('equals itself without overlap, bit for bit', () => {
    const model = made();
    const run = (overlap: boolean) => {
      const tokens: number[] = [];
      withDecoder(
        model,
        (decoder, make) => {
          const sequences = [make(), make()];
          prefill(model, sequences, [text(100), text(40, 3)], null, { kernels: PLAIN });
          decoder.launch(sequences, [1, 2]);
          for (let i = 0; i < 120; i++) {
            tokens.push(...decoder.next());
            decoder.launch(sequences);
          }
        },
        { overlap },
      );
      return tokens;
    };
    expect(run(true)).toEqual(run(false));
  });

  onGpu('follows forks, which leave each other alone, and sequences that drop out', () => {
    const model = made();
    const prefix = text(90);
    withDecoder(model, (decoder, make) => {
      const trunk = make();
      prefill(model, [trunk], [prefix], null, { kernels: PLAIN });
      const branch = trunk.fork();
      const [left, right] = [text(30, 3), text(30, 4)];
      left.forEach((token, i) => {
        decoder.launch([trunk, branch], [token, right[i]]);
        if (i % 7 !== 0) return;
        const [a, b] = decoder.logits();
        expect(relativeError(a, lastLogits(model, [...prefix, ...left.slice(0, i + 1)], PLAIN))).toBeLessThan(LIMIT);
        expect(relativeError(b, lastLogits(model, [...prefix, ...right.slice(0, i + 1)], PLAIN))).toBeLessThan(LIMIT);
      });
      decoder.launch([branch], [9]);
      const [last] = decoder.logits();
      expect(relativeError(last, lastLogits(model, [...prefix, ...right, 9], PLAIN))).toBeLessThan(LIMIT);
      branch.free();
    });
  });

  onGpu('reads and remembers what was predicted', () => {
    const model = made();
    withDecoder(model, (decoder, make, cache) => {
      const sequence = make();
      prefill(model, [sequence], [text(5)], null, { kernels: PLAIN });
      for (let S = 6; S <= 400; S++) {
        decoder.launch([sequence], [S % 256]);
        expect(cache.bytes).toBe(cacheBytes(model.shape, model.device, S, 'bf16'));
        if (S % 32 !== 0) continue;
        const reads = decoder.step!.reads.read();
        for (let i = 0; i < reads.length; i += 3) {
          const all = reads[i] + reads[i + 1] + reads[i + 2];
          if (S >= NSA.n_sel * NSA.l_sel) expect(all).toBe(predictedReads(model.shape, S));
          else expect(all).toBeLessThanOrEqual(predictedReads(model.shape, S));
        }
      }
    });
  });

  onGpu('greedy text equals the slow loop but for near ties', async () => {
    const config = configOf();
    const model = made();
    const tokenizer = createTokenizer('byte');
    const stream = generate({ model, tokenizer, config }, 'Once', {
      maxNewTokens: 200,
      sampling: { temperature: 0 },
    });
    let result = await stream.next();
    while (!result.done) result = await stream.next();
    const context = [...Buffer.from('Once')];
    for (const token of result.value.tokens) {
      const logits = lastLogits(model, context, PLAIN);
      const spread = Math.max(...logits) - Math.min(...logits);
      expect(logits[token]).toBeGreaterThan(Math.max(...logits) - LIMIT * spread);
      context.push(token);
    }
    expect(result.value.tokens.length).toBeGreaterThan(20);
  });
});

describe('models that it refuses', () => {
  it('the CPU', () => {
    const model = tinyModel(configOf());
    models.push(model);
    expect(cpu().kind).toBe('cpu');
    expect(deviceDecoderRefusal(model)).toBe('cpu records no graphs');
  });

  onGpu('fp32, phi mlp, small heads', () => {
    const refusal = (sections: Sections, dtype: 'f32' | 'bf16' = 'bf16') => {
      const model = tinyModel(configOf(sections), 256, 5, { device: cuda(), dtype });
      models.push(model);
      return deviceDecoderRefusal(model);
    };
    expect(refusal({}, 'f32')).toBe('the fused step computes in bf16, not in f32');
    expect(refusal({ nsa: { phi: 'mlp' } })).toBe('phi mlp is not fused');
    expect(refusal({ model: { d_k: 16 } })).toContain('d_k 16');
  });
});
