/** Decoding by the fused step on the emulated GPU, against float64. */
import { setImmediate } from 'node:timers/promises';
import { afterAll, describe, expect, it } from 'vitest';
import { DecodeCache } from '../model/cache.js';
import { EmulatedCuda } from '../testing/emulated-cuda.js';
import { randomValues } from '../testing/numbers.js';
import { DeviceDecoder, deviceDecoderRefusal, stepCapacity } from './device-decoder.js';
import { Comparison } from './testing/comparison.js';
import { ReplayWeights, selectionOf } from './testing/step-replay.js';
import { tinyConfig, tinyModel } from './testing/tiny-model.js';

const NSA = { l: 8, d: 4, l_sel: 32, n_sel: 4, w: 50 };
const config = tinyConfig({ model: { dim: 64, n_heads: 4, n_kv_groups: 2, d_k: 32, d_v: 32 }, nsa: NSA });
const device = new EmulatedCuda({ multiprocessors: 8 }); // clusters of four for one sequence, of two for two
const model = tinyModel(config, 256, 5, { device, dtype: 'bf16' });
afterAll(() => model.free());

const tokenAt = (at: number, row: number) => (at * at * 7 + at * 91 * row + row) % 256;

const selectionOfRow = (decoder: DeviceDecoder, row: number) => {
  const { selected } = decoder.step!;
  return selectionOf(selected.read(), selected.shape, row);
};

describe('the tokens of context that a step is made for', () => {
  const [shared, most] = [118_784, 1_500_000];

  it('doubles, with room for a while', () => {
    expect(stepCapacity(1, shared, most)).toBe(8192);
    expect(stepCapacity(8192 - 1024, shared, most)).toBe(8192);
    expect(stepCapacity(8192 - 1023, shared, most)).toBe(16_384);
    expect(stepCapacity(40_000, shared, most)).toBe(65_536);
  });

  it('is as small as possible where twice as much would not leave scores in shared memory', () => {
    expect(stepCapacity(65_536, shared, most)).toBe(69_632);
    expect(stepCapacity(69_632 - 1024, shared, most)).toBe(69_632);
    expect(stepCapacity(69_632 - 1023, shared, most)).toBe(73_728);
    expect(stepCapacity(shared - 1024, shared, most)).toBe(shared);
    expect(stepCapacity(65_536, 200_000, most)).toBe(69_632);
    expect(stepCapacity(140_000, 300_000, most)).toBe(262_144);
  });

  it('doubles where scores do not fit into shared memory anyway, up to what is possible', () => {
    expect(stepCapacity(shared - 1023, shared, most)).toBe(131_072);
    expect(stepCapacity(65_536, 0, most)).toBe(131_072);
    expect(stepCapacity(1_200_000, shared, most)).toBe(most);
    expect(stepCapacity(most + 1, shared, most)).toBe(most + 1);
  });
});

describe('a step on an emulated GPU', () => {
  it('equals float64', async () => {
    expect(deviceDecoderRefusal(model)).toBeNull();
    const comparison = new Comparison(new ReplayWeights(model));
    const cache = new DecodeCache(device, model.shape, model.dtype);
    const decoder = new DeviceDecoder(model, cache);
    const sequence = cache.sequence();
    for (let at = 0; at < (process.env['TREFOIL_LONG'] ? 400 : 120); at++) {
      decoder.launch([sequence], [tokenAt(at, 1)]);
      const [logits] = decoder.logits();
      comparison.next(tokenAt(at, 1), selectionOfRow(decoder, 0), `token ${at}`, logits);
      expect(decoder.next()[0]).toBe(logits.indexOf(Math.max(...logits)));
      await setImmediate(); // the emulator blocks the thread, and the test runner wants to hear of it
    }
    comparison.finish('one sequence');
    decoder.free();
    sequence.free();
  });

  const yarn = { rope_type: 'yarn', rope_factor: 4, rope_original_context: 64, rope_theta: 1000 };
  it.each([
    ['biases, norms of heads and yarn', { qkv_bias: true, qk_norm: true, ...yarn }, {}],
    ['positions in the window alone', {}, { rope: 'window', cmp_rope: 'none' }],
  ])('equals float64 with %s', async (name, more, positions) => {
    const options = { ...config.model, ...more };
    const own = tinyModel(tinyConfig({ model: options, nsa: { ...NSA, ...positions } }), 256, 5, {
      ...{ device, dtype: 'bf16' },
    });
    own.parameters.forEach(({ name, value }, k) => {
      const isNorm = /[qk]_norm$/.test(name);
      if (!isNorm && !name.endsWith('qkv_bias')) return;
      value.write(randomValues(value.size, k).map((x) => (isNorm ? 1 + 0.3 * x : x)));
    });
    expect(deviceDecoderRefusal(own)).toBeNull();
    const comparison = new Comparison(new ReplayWeights(own));
    const cache = new DecodeCache(device, own.shape, own.dtype);
    const decoder = new DeviceDecoder(own, cache);
    const sequence = cache.sequence();
    for (let at = 0; at < 48; at++) {
      decoder.launch([sequence], [tokenAt(at, 1)]);
      comparison.next(tokenAt(at, 1), selectionOfRow(decoder, 0), `token ${at}`, decoder.logits()[0]);
      await setImmediate();
    }
    comparison.finish(name);
    decoder.free();
    sequence.free();
    own.free();
  });

  it('records one graph for each batch size, whatever the sequences', async () => {
    const own = new EmulatedCuda({ multiprocessors: 8 });
    const record = own.record.bind(own);
    let graphs = 0;
    own.record = (work) => {
      graphs += 1;
      return record(work);
    };
    const small = tinyModel(config, 256, 5, { device: own, dtype: 'bf16' });
    const cache = new DecodeCache(own, small.shape, small.dtype);
    const decoder = new DeviceDecoder(small, cache);
    const weights = new ReplayWeights(small);
    const texts = Array.from({ length: 3 }, () => ({ sequence: cache.sequence(), expected: new Comparison(weights) }));
    const rounds = [[0], [1], [0], [0, 1], [2], [1, 2], [2, 0], [0, 1], [1], [2, 1], [2], [0]];
    for (const [round, rows] of rounds.entries()) {
      const members = rows.map((row) => texts[row]);
      decoder.launch(
        members.map(({ sequence }) => sequence),
        rows.map((row) => tokenAt(round, row + 1)),
      );
      const logits = decoder.logits();
      for (const [i, { expected }] of members.entries())
        expected.next(tokenAt(round, rows[i] + 1), selectionOfRow(decoder, i), `round ${round}, row ${i}`, logits[i]);
      await setImmediate();
    }
    for (const [i, { expected }] of texts.entries()) expected.finish(`sequence ${i}`);
    expect(graphs).toBe(2);
    decoder.free();
    for (const { sequence } of texts) sequence.free();
    small.free();
  });

  it('keeps forks apart', async () => {
    const cache = new DecodeCache(device, model.shape, model.dtype);
    const decoder = new DeviceDecoder(model, cache);
    const trunk = cache.sequence();
    const stem = new Comparison(new ReplayWeights(model));
    // A length at which the next token completes no compressed block: the page of the last ones stays shared for a while.
    for (let at = 0; at < NSA.l + NSA.d + 1; at++) {
      decoder.launch([trunk], [tokenAt(at, 1)]);
      stem.next(tokenAt(at, 1), selectionOfRow(decoder, 0), `before, token ${at}`, decoder.logits()[0]);
      await setImmediate();
    }
    const branch = trunk.fork();
    const other = stem.fork();
    for (let at = 0; at < 2 * NSA.l; at++) {
      decoder.launch([trunk, branch], [tokenAt(at, 2), tokenAt(at, 3)]);
      const [left, right] = decoder.logits();
      stem.next(tokenAt(at, 2), selectionOfRow(decoder, 0), `left, token ${at}`, left);
      other.next(tokenAt(at, 3), selectionOfRow(decoder, 1), `right, token ${at}`, right);
      await setImmediate();
    }
    stem.finish('left');
    other.finish('right');
    decoder.free();
    for (const sequence of [trunk, branch]) sequence.free();
  });
});
