/** Decoding by the fused step on the emulated GPU, against float64. */
import { setImmediate } from 'node:timers/promises';
import { afterAll, describe, expect, it } from 'vitest';
import { fillCache } from '../bench/fill-cache.js';
import { DecodeCache } from '../model/cache.js';
import type { LanguageModel } from '../model/language-model.js';
import { EmulatedCuda } from '../testing/emulated-cuda.js';
import { relativeError } from '../testing/numbers.js';
import { DeviceDecoder, deviceDecoderRefusal } from './device-decoder.js';
import { Comparison } from './testing/comparison.js';
import { ReplayWeights, selectionOf } from './testing/step-replay.js';
import { tinyConfig, tinyModel } from './testing/tiny-model.js';

type Sections = NonNullable<Parameters<typeof tinyConfig>[0]>;
const MODEL = { dim: 64, n_heads: 4, n_kv_groups: 2, d_k: 32, d_v: 32 };
const NSA = { l: 8, d: 4, l_sel: 32, n_sel: 4, w: 50 };
/** Two ways in bf16 that select the same blocks. */
const LIMIT = 2e-2;

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
    const comparison = new Comparison(new ReplayWeights(model));
    const steps = await decode(model, 1, 0, process.env['TREFOIL_LONG'] ? 200 : 45);
    steps.forEach(({ logits: [logits], selected, next }, at) => {
      const shape = [model.shape.n_layers, 1, model.shape.n_kv_groups, NSA.n_sel];
      comparison.next(tokenAt(at, 1), selectionOf(selected, shape, 0), `token ${at}`, logits);
      expect(next[0]).toBe(logits.indexOf(Math.max(...logits)));
    });
    comparison.finish('one sequence');
  });

  it('keeps forks apart', { timeout: 600_000 }, async () => {
    const model = made({});
    const cache = new DecodeCache(model.device, model.shape, model.dtype);
    const decoder = new DeviceDecoder(model, cache);
    const trunk = cache.sequence();
    const stem = new Comparison(new ReplayWeights(model));
    const selectionOfRow = (row: number) => {
      const { selected } = decoder.step!;
      return selectionOf(selected.read(), selected.shape, row);
    };
    // So many that the next token completes no compressed block: the page of the last ones stays shared for a while.
    for (let at = 0; at < NSA.l + NSA.d + 1; at++) {
      decoder.launch([trunk], [tokenAt(at, 1)]);
      stem.next(tokenAt(at, 1), selectionOfRow(0), `before, token ${at}`, decoder.logits()[0]);
      await setImmediate();
    }
    const branch = trunk.fork();
    const other = stem.fork();
    for (let at = 0; at < 2 * NSA.l; at++) {
      decoder.launch([trunk, branch], [tokenAt(at, 2), tokenAt(at, 3)]);
      const [left, right] = decoder.logits();
      stem.next(tokenAt(at, 2), selectionOfRow(0), `left, token ${at}`, left);
      other.next(tokenAt(at, 3), selectionOfRow(1), `right, token ${at}`, right);
      await setImmediate();
    }
    stem.finish('left');
    other.finish('right');
    decoder.free();
    for (const sequence of [trunk, branch]) sequence.free();
  });
});
