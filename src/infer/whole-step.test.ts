/** A decode step in one launch against the same step kernel by kernel and against the CPU, on the emulated GPU. */
import { setImmediate } from 'node:timers/promises';
import { afterAll, describe, expect, it } from 'vitest';
import { DecodeCache } from '../model/cache.js';
import type { LanguageModel } from '../model/language-model.js';
import { EmulatedCuda } from '../testing/emulated-cuda.js';
import { relativeError } from '../testing/numbers.js';
import { lastLogits } from './context-reader.js';
import { DeviceDecoder, deviceDecoderRefusal } from './device-decoder.js';
import { tinyConfig, tinyModel } from './testing/tiny-model.js';

type Sections = NonNullable<Parameters<typeof tinyConfig>[0]>;
const MODEL = { dim: 64, n_heads: 4, n_kv_groups: 2, d_k: 32, d_v: 32 };
const NSA = { l: 8, d: 4, l_sel: 32, n_sel: 4, w: 50 };

const device = new EmulatedCuda({ multiprocessors: 3 });
const models: LanguageModel[] = [];
afterAll(() => {
  for (const model of models) model.free();
});

const text = (length: number, seed: number) =>
  Array.from({ length }, (_, i) => (i * i * 7 + i * 91 * seed + seed) % 256);

interface Step {
  readonly logits: readonly Float32Array[];
  readonly next: readonly number[];
  readonly selected: readonly number[];
  readonly reads: readonly number[];
}

async function decode(model: LanguageModel, texts: readonly number[][], whole: boolean): Promise<Step[]> {
  const cache = new DecodeCache(model.device, model.shape, model.dtype);
  const decoder = new DeviceDecoder(model, cache, { whole });
  const sequences = texts.map(() => cache.sequence());
  const steps: Step[] = [];
  for (let at = 0; at < texts[0].length; at++) {
    decoder.launch(
      sequences,
      texts.map((tokens) => tokens[at]),
    );
    const { selected, reads } = decoder.step!;
    steps.push({
      logits: decoder.logits().map((logits) => logits.slice()),
      ...{ next: Array.from(decoder.next()), selected: Array.from(selected.read()), reads: Array.from(reads.read()) },
    });
    await setImmediate(); // the emulator blocks the thread, and the test runner wants to hear of it
  }
  decoder.free();
  for (const sequence of sequences) sequence.free();
  return steps;
}

const CASES: readonly [string, Sections, number, number][] = [
  ['one sequence', {}, 1, 200],
  [
    'three sequences, conv, SwiGLU, tied',
    { model: { mlp: 'swiglu', tie_embeddings: true }, nsa: { phi: 'conv' } },
    3,
    140,
  ],
];

describe('a step in one launch', () => {
  it.each(CASES)('equals the step kernel by kernel: %s', { timeout: 600_000 }, async (_, sections, batch, length) => {
    const config = tinyConfig({ model: { ...MODEL, ...sections.model }, nsa: { ...NSA, ...sections.nsa } });
    const model = tinyModel(config, 256, 5, { device, dtype: 'bf16' });
    const exact = tinyModel(config, 256, 5);
    models.push(model, exact);
    expect(deviceDecoderRefusal(model)).toBeNull();
    const texts = Array.from({ length: batch }, (_, row) => text(length, row + 1));
    const [together, apart] = [await decode(model, texts, true), await decode(model, texts, false)];
    together.forEach((step, at) => {
      const where = `token ${at}`;
      expect(step.selected, where).toEqual(apart[at].selected);
      expect(step.reads, where).toEqual(apart[at].reads);
      step.logits.forEach((logits, row) => {
        expect(relativeError(logits, apart[at].logits[row]), `${where}, row ${row}`).toBeLessThan(1e-2);
        expect(step.next[row]).toBe(logits.indexOf(Math.max(...logits)));
        if (at % 50 !== 49) return;
        const wanted = lastLogits(exact, texts[row].slice(0, at + 1), {});
        expect(relativeError(logits, wanted), `${where}, row ${row}, CPU`).toBeLessThan(0.1);
      });
    });
  });
});
