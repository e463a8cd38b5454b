/** Which way tokens are read on a GPU, by what is launched. */
import { describe, expect, it } from 'vitest';
import { createTokenizer } from '../data/tokenizer.js';
import { DecodeCache } from '../model/cache.js';
import { headShapeOf, modelShape, sparseShapeOf } from '../model/shape.js';
import { exportedBy, RecordingCuda } from '../testing/recording-cuda.js';
import { DeviceDecoder } from './device-decoder.js';
import { generate } from './generate.js';
import { tinyConfig, tinyModel } from './testing/tiny-model.js';

const config = tinyConfig({
  model: { dim: 64, n_heads: 4, n_kv_groups: 2, d_k: 32, d_v: 32 },
  nsa: { l: 8, d: 4, l_sel: 32, n_sel: 4, w: 50 },
});
const shape = modelShape(config, 256);

/** A GPU that records graphs; `fixed`: bytes of shared memory that attention of a step takes at any length. */
class Gpu extends RecordingCuda {
  constructor(fixed: number) {
    const others = exportedBy({ heads: headShapeOf(shape), sparse: sparseShapeOf(shape) });
    super((name) => (name === 'step_attention_shared' ? fixed : others(name)));
  }

  record(work: () => void) {
    work();
    return { replay() {}, free() {} };
  }
}

describe('decoding on a GPU', () => {
  it.each([
    ['by the fused step', 40_000, true],
    ['without it where shared memory does not do', 300_000, false],
  ])('generates one token after another %s', async (_, fixed, isFused) => {
    const device = new Gpu(fixed);
    const model = tinyModel(config, 256, 5, { device, dtype: 'bf16' });
    // This GPU computes nothing: all logits are 0.
    const tokenizer = { ...createTokenizer('byte'), separator: 255 };
    const stream = generate({ model, tokenizer, config }, [1, 2, 3], { maxNewTokens: 3, sampling: { temperature: 0 } });
    let { done, value } = await stream.next();
    while (!done) ({ done, value } = await stream.next());
    expect(value).toEqual({ tokens: [0, 0, 0], finishReason: 'length' });
    const steps = device.launches.filter(({ kernel }) => kernel === 'step_attention');
    expect(steps.length > 0).toBe(isFused);
    model.free();
    expect(device.pool.bytesInUse).toBe(0);
  });

  it('makes room for as many tokens as there can be where twice as many are too many', () => {
    const device = new Gpu(40_000);
    const model = tinyModel(config, 256, 5, { device, dtype: 'bf16' });
    const cache = new DecodeCache(device, model.shape, model.dtype);
    const decoder = new DeviceDecoder(model, cache);
    // Three sequences of two groups: too many for the compressed branch to be spread over the GPU, which has no limit.
    const sequences = [cache.sequence(), cache.sequence(), cache.sequence()];
    const [sequence] = sequences;
    const prepare = (length: number) => {
      sequence.advance(length - sequence.length);
      return decoder.prepare(sequences).context;
    };
    expect(prepare(100)).toBe(8192);
    expect(prepare(8000)).toBe(8192);
    expect(prepare(8192)).toBe(16_384);
    const most = 32 * (Math.floor((226 * 1024 - 40_000) / 8) - 2);
    expect(prepare(700_000)).toBe(most);
    expect(prepare(most - 1)).toBe(most);
    expect(decoder.hasRoom(sequences)).toBe(true);
    sequence.advance(1);
    expect(decoder.hasRoom(sequences)).toBe(false);
    expect(() => decoder.prepare(sequences)).toThrow(`a step with ${most + 1} tokens of context`);
    decoder.free();
    for (const each of sequences) each.free();
    model.free();
  });
});
