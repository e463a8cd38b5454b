/** Decoding by the fused step on the emulated GPU, against float64. */
import { setImmediate } from 'node:timers/promises';
import { afterAll, describe, expect, it } from 'vitest';
import { fillCache } from '../bench/fill-cache.js';
import { DecodeCache } from '../model/cache.js';
import type { LanguageModel } from '../model/language-model.js';
import { EmulatedCuda } from '../testing/emulated-cuda.js';
import { relativeError } from '../testing/numbers.js';
import { DeviceDecoder, deviceDecoderRefusal } from './device-decoder.js';
import { StepReplay, selectionOf } from './testing/step-replay.js';
import { tinyConfig, tinyModel } from './testing/tiny-model.js';

type Sections = NonNullable<Parameters<typeof tinyConfig>[0]>;
const MODEL = { dim: 64, n_heads: 4, n_kv_groups: 2, d_k: 32, d_v: 32 };
const NSA = { l: 8, d: 4, l_sel: 32, n_sel: 4, w: 50 };
/** bf16 rounds every layer's result; scores of blocks that differ by less may be ranked either way. */
const LIMIT = 2e-2;
const TIE = 5e-2;

const device = new EmulatedCuda({ multiprocessors: 3 });
const models: LanguageModel[] = [];
afterAll(() => {
  for (const model of models) model.free();
});

function made({ model, nsa }: Sections): LanguageModel {
  const config = tinyConfig({ model: { ...MODEL, ...model }, nsa: { ...NSA, ...nsa } });
  const result = tinyModel(config, 256, 5, { device, dtype: 'bf16' });
  models.push(result);
  expect(deviceDecoderRefusal(result)).toBeNull();
  return result;
}

const tokenAt = (at: number, row: number) => (at * at * 7 + at * 91 * row + row) % 256;

interface Step {
  readonly logits: readonly Float32Array[];
  readonly next: readonly number[];
  readonly selected: Int32Array;
  readonly reads: readonly number[];
}

/** `steps` tokens of each of `batch` sequences behind `filled` of random keys. */
async function decode(model: LanguageModel, batch: number, filled: number, steps: number) {
  const cache = new DecodeCache(model.device, model.shape, model.dtype);
  const decoder = new DeviceDecoder(model, cache);
  const sequences = Array.from({ length: batch }, () => cache.sequence());
  if (filled > 0) fillCache(cache, sequences, filled);
  const results: Step[] = [];
  for (let at = 0; at < steps; at++) {
    decoder.launch(
      sequences,
      sequences.map((_, row) => tokenAt(at, row + 1)),
    );
    const { selected, reads } = decoder.step!;
    results.push({
      logits: decoder.logits().map((logits) => logits.slice()),
      next: Array.from(decoder.next()),
      ...{ selected: (selected.read() as Int32Array).slice(), reads: Array.from(reads.read()) },
    });
    await setImmediate(); // the emulator blocks the thread, and the test runner wants to hear of it
  }
  decoder.free();
  for (const sequence of sequences) sequence.free();
  return results;
}

describe('a step on an emulated GPU', () => {
  it('equals float64', { timeout: 600_000 }, async () => {
    const model = made({});
    const replay = new StepReplay(model);
    const steps = await decode(model, 1, 0, process.env['TREFOIL_LONG'] ? 200 : 45);
    steps.forEach(({ logits: [logits], selected, next }, at) => {
      const shape = [model.shape.n_layers, 1, model.shape.n_kv_groups, NSA.n_sel];
      const exact = replay.next(tokenAt(at, 1), selectionOf(selected, shape, 0));
      expect(relativeError(logits, exact.logits), `token ${at}`).toBeLessThan(LIMIT);
      expect(exact.margin, `token ${at}`).toBeLessThan(TIE);
      expect(next[0]).toBe(logits.indexOf(Math.max(...logits)));
    });
  });
});
