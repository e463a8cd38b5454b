/** Tokens drawn by a GPU against those of the host's sampler. */
import { describe, expect, it } from 'vitest';
import { cudaAbsence } from '../device/cuda/cuda.js';
import { cudaRuntime } from '../device/cuda/runtime.js';
import type { Device } from '../device/device.js';
import { SETTINGS, sampleRows, UNCERTAIN } from '../ops/sample/op.js';
import { Tensor } from '../tensor/tensor.js';
import { cuda, reportNoGpu } from '../testing/devices.js';
import { EmulatedCuda } from '../testing/emulated-cuda.js';
import { randomNumbers } from '../testing/random.js';
import { createSampler, deviceDraws, type SamplingOptions, uniformOfDraw } from './engine/sampler.js';

const emulated = new EmulatedCuda();
const gpus: [string, () => Device][] = [['an emulated GPU', () => emulated]];
const absence = cudaAbsence();
if (absence === null) gpus.push(['cuda', cuda]);
else reportNoGpu(absence);

/** The tokens that the GPU draws for rows of logits, each with its options; draw number 3 of each seed. */
function drawn(device: Device, rows: readonly Float32Array[], options: readonly SamplingOptions[], vocabulary: number) {
  const width = rows[0].length;
  const logits = Tensor.from(
    device,
    rows.flatMap((row) => [...row]),
    [rows.length, width],
  );
  const best = rows.map((row) => createSampler({ temperature: 0 })(row.subarray(0, vocabulary), 0));
  const settings = options.flatMap((one) => deviceDraws(one)?.settings(3) ?? []);
  const uploaded = Tensor.from(device, settings, [rows.length, SETTINGS], 'f64');
  const [next, ids] = [0, 1].map(() => Tensor.from(device, best, [rows.length], 'i32'));
  const runtime = cudaRuntime(device);
  if (!runtime) throw new Error('not a GPU');
  sampleRows(runtime, { logits, vocabulary, settings: uploaded, next, ids });
  const result = { next: [...next.read()], ids: [...ids.read()], best };
  for (const tensor of [logits, uploaded, next, ids]) tensor.free();
  return result;
}

const normal = (next: () => number) => Math.sqrt(-2 * Math.log(1 - next())) * Math.cos(2 * Math.PI * next());

const SHAPES: readonly [string, (next: () => number, i: number) => number][] = [
  ['normal', (next) => normal(next)],
  ['wide', (next) => 6 * normal(next)],
  ['peaked', (next, i) => (i % 97 === 5 ? 20 : 0) + normal(next)],
  ['with many ties', (next) => Math.round(2 * normal(next)) / 2],
  ['with tokens ruled out', (next, i) => (i % 3 === 0 ? Number.NEGATIVE_INFINITY : 3 * normal(next))],
  ['with zeros of both signs', (_, i) => (i % 2 === 0 ? 0 : -0)],
];

describe.each(gpus)('drawing on %s', (_, device) => {
  it.each(SHAPES)('gives the tokens of the host: %s', (name, logit) => {
    const vocabulary = 1500;
    const next = randomNumbers(name.length);
    const options = Array.from({ length: 48 }, (_, i): SamplingOptions => {
      const topP = [1, 0.9, 0.3, 0.999][i % 4];
      const topK = [0, 40, 1, 900, 5000][i % 5];
      const minP = [0, 0, 0.05, 0.4][Math.floor(i / 4) % 4];
      return { temperature: i % 13 === 5 ? 0 : 0.3 + 1.2 * next(), topK, topP, minP, seed: i };
    });
    const rows = options.map(() => Float32Array.from({ length: vocabulary + 20 }, (_, i) => logit(next, i)));
    const result = drawn(device(), rows, options, vocabulary);
    let uncertain = 0;
    for (const [i, row] of rows.entries()) {
      if (result.next[i] === UNCERTAIN) {
        uncertain += 1;
        expect(result.ids[i]).toBe(result.best[i]);
        continue;
      }
      const expected = createSampler(options[i])(row.subarray(0, vocabulary), 3);
      expect([i, result.next[i], result.ids[i]]).toEqual([i, expected, expected]);
    }
    // Equal logits: their bin has more tokens than are sorted.
    if (name !== 'with zeros of both signs') expect(uncertain).toBe(0);
    else expect(uncertain).toBeLessThan(48);
  });

  it('leaves what rounding could decide to the host', () => {
    const row = Float32Array.from({ length: 1000 }, () => Number.NEGATIVE_INFINITY);
    const uniform = uniformOfDraw(7, 3);
    // Two tokens whose limit is at the uniform number.
    row[3] = Math.fround(Math.log(uniform / (1 - uniform)));
    row[700] = 0;
    const temperature = row[3] / Math.log(uniform / (1 - uniform));
    for (const topP of [1, 0.9999999]) {
      const close = drawn(device(), [row], [{ temperature, topP, seed: 7 }], 1000);
      const clear = drawn(device(), [row], [{ temperature: 2 * temperature, topP, seed: 7 }], 1000);
      expect(clear.next[0]).toBe(createSampler({ temperature: 2 * temperature, topP, seed: 7 })(row, 3));
      if (topP === 1) expect(close.next[0]).toBe(UNCERTAIN);
    }
    // min-p at a weight.
    row[700] = 0;
    row[3] = -1;
    const options = { temperature: 1, minP: Math.exp(-1), seed: 7 };
    expect(drawn(device(), [row], [options], 1000).next[0]).toBe(UNCERTAIN);
  });

  it('takes unsound rows and extreme temperatures', () => {
    const next = randomNumbers(5);
    const rows = [1e-6, 1e-42, 1e6, 1].map(() => Float32Array.from({ length: 400 }, () => normal(next)));
    const options = [1e-6, 1e-42, 1e6, 1].map((temperature, i) => ({ temperature, topP: 0.9, topK: 50, seed: i }));
    const result = drawn(device(), rows, options, 400);
    rows.forEach((row, i) => {
      const expected = createSampler(options[i])(row, 3);
      expect([expected, UNCERTAIN]).toContain(result.next[i]);
    });
    expect(result.next[0]).not.toBe(UNCERTAIN);
    expect(result.next[3]).not.toBe(UNCERTAIN);
  });
});
