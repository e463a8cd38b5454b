import { afterAll, describe, expect, it } from 'vitest';
import { type CachedSequence, DecodeCache } from '../model/cache.js';
import type { LanguageModel } from '../model/language-model.js';
import { cpu } from '../testing/devices.js';
import { expectSameForAnyThreadCount } from '../testing/same-bytes.js';
import { prefill, readTokens } from './decode.js';
import { RecordedSteps } from './recorded-steps.js';
import { tinyConfig, tinyModel } from './testing/tiny-model.js';

const models: LanguageModel[] = [];
afterAll(() => {
  for (const model of models) model.free();
});

function made(sections: Parameters<typeof tinyConfig>[0] = {}): LanguageModel {
  const model = tinyModel(tinyConfig(sections), 256, 5, { device: cpu(), dtype: 'f32' });
  models.push(model);
  return model;
}

function text(length: number, seed: number): number[] {
  return Array.from({ length }, (_, i) => (i * i * 7 + i * 91 * seed + seed) % 256);
}

type Read = (sequences: readonly CachedSequence[], tokens: readonly number[]) => Float32Array[];

const reading =
  (model: LanguageModel): Read =>
  (sequences, tokens) =>
    readTokens(
      model,
      sequences,
      tokens.map((token) => [token]),
    );

/** As the engine reads. */
const repeating =
  (model: LanguageModel, steps: RecordedSteps): Read =>
  (sequences, tokens) =>
    steps.read(sequences, tokens) ?? reading(model)(sequences, tokens);

/** Logits of three texts of different lengths that are continued together, then two of them, then a fork of one. */
function continued(model: LanguageModel, read: Read, steps: number): Float32Array[] {
  const cache = new DecodeCache(model.device, model.shape);
  const prompts = [text(3, 1), text(70, 2), text(129, 3)];
  const sequences = prompts.map(() => cache.sequence());
  prefill(model, sequences, prompts);
  const logits: Float32Array[] = [];
  const go = (texts: readonly CachedSequence[], count: number) => {
    for (let i = 0; i < count; i++)
      logits.push(
        ...read(
          texts,
          texts.map((_, row) => (31 * i + row) % 256),
        ),
      );
  };
  go(sequences, steps);
  go(sequences.slice(1), 5);
  const fork = sequences[2].fork();
  go([fork], steps);
  go([sequences[2]], 3);
  for (const sequence of [...sequences, fork]) sequence.free();
  return logits;
}

const variants = {
  avg: {},
  conv: { nsa: { phi: 'conv', cmp_rope: 'before' } },
  mlp: { nsa: { phi: 'mlp', cmp_rope: 'none', gate: 'sigmoid' } },
  'shared keys': { nsa: { shared_kv: true } },
  'swiglu, tied': { model: { tie_embeddings: true, mlp: 'swiglu' } },
  dense: { model: { attention: 'dense' } },
  'window layers': { model: { layer_pattern: ['window', 'nsa'] } },
};

describe('RecordedSteps', () => {
  it.each(Object.entries(variants))('%s: repeated steps have the bits of readTokens', (_, sections) => {
    const model = made(sections as Parameters<typeof tinyConfig>[0]);
    const plain = continued(model, reading(model), 40);
    const before = model.device.pool.bytesInUse;
    expectSameForAnyThreadCount(() => {
      const steps = RecordedSteps.of(model)!;
      const repeated = continued(model, repeating(model, steps), 40);
      expect(repeated).toEqual(plain);
      steps.free();
      expect(model.device.pool.bytesInUse).toBe(before);
      return repeated.map((logits) => new Uint8Array(logits.buffer, logits.byteOffset, logits.byteLength));
    });
  });

  it('allocate nothing and record nothing in steady state', () => {
    const model = made({ model: { attention: 'dense' } });
    const steps = RecordedSteps.of(model)!;
    const cache = new DecodeCache(model.device, model.shape);
    const sequence = cache.sequence();
    prefill(model, [sequence], [text(5, 1)]);
    expect(steps.read([sequence], [1])).toBe(null);
    for (const token of [1, 2]) steps.read([sequence], [token]);
    const { systemAllocations } = model.device.pool;
    let calls = 0;
    const { record } = cpu();
    cpu().record = (...given) => {
      calls += 1;
      return record.apply(cpu(), given);
    };
    for (let i = 0; i < 20; i++) steps.read([sequence], [i]);
    cpu().record = record;
    expect(calls).toBe(0);
    expect(model.device.pool.systemAllocations).toBe(systemAllocations);
    sequence.free();
    steps.free();
  });

  it('are made again for another cache, and after a change of the selected blocks', () => {
    const model = made();
    const steps = RecordedSteps.of(model)!;
    for (const nSel of [4, 5]) {
      model.setSelectedBlocks(nSel);
      const plain = continued(
        model,
        (texts, tokens) =>
          readTokens(
            model,
            texts,
            tokens.map((token) => [token]),
          ),
        3,
      );
      expect(continued(model, repeating(model, steps), 3)).toEqual(plain);
    }
    steps.free();
  });

  it('refuse an empty text and a token outside the vocabulary, without reading anything', () => {
    const model = made();
    const steps = RecordedSteps.of(model)!;
    const cache = new DecodeCache(model.device, model.shape);
    const sequence = cache.sequence();
    expect(steps.read([sequence], [1])).toBe(null);
    prefill(model, [sequence], [[1, 2]]);
    expect(steps.read([sequence], [256])).toBe(null);
    expect(steps.read([sequence], [-1])).toBe(null);
    expect(sequence.length).toBe(2);
    sequence.free();
    steps.free();
  });
});
