import { afterAll, describe, expect, it } from 'vitest';
import { type Batch, IGNORED_TARGET } from '../data/batch.js';
import { tinyConfig, tinyModel } from '../infer/testing/tiny-model.js';
import type { LanguageModel } from '../model/language-model.js';
import { BatchUploader } from './device-batch.js';
import { FarContextGain } from './far-context.js';

const batchOf = (inputs: number[], starts: number[]) => {
  const tokens = Int32Array.from(inputs);
  const targets = Int32Array.from([...inputs.slice(1), 0]);
  return {
    inputs: tokens,
    targets,
    targetCount: inputs.length,
    cuSeqlens: Int32Array.from(starts),
    sampleIds: [],
    epoch: 0,
  };
};
const INPUTS = Array.from({ length: 150 }, (_, i) => (i * i * 7) % 256);

describe('far context', () => {
  it('compares every target beyond the cut with itself, in pieces that begin where the cut does', () => {
    const asked: number[][] = [];
    const gain = new FarContextGain(8, ({ inputs, targets, cuSeqlens }) => {
      for (let s = 0; s + 1 < cuSeqlens.length; s++) {
        asked.push([...inputs.subarray(cuSeqlens[s], cuSeqlens[s + 1])]);
        expect([...targets.subarray(cuSeqlens[s], cuSeqlens[s] + 7)]).toEqual(new Array(7).fill(IGNORED_TARGET));
      }
      return Array.from(targets, (target) => (target === IGNORED_TARGET ? 0 : 3));
    });
    // Sequences of 20, 8 and 13 tokens: 12, 0 and 5 targets have more than 8 tokens of context.
    const batch = batchOf(
      Array.from({ length: 41 }, (_, i) => i),
      [0, 20, 28, 41],
    );
    gain.add(batch, new Array(41).fill(2.5));
    expect(asked[0]).toEqual([1, 2, 3, 4, 5, 6, 7, 8, 9]); // the targets of 8 and 9, the first with 8 tokens
    expect(asked).toHaveLength(6 + 3);
    expect(gain.result()).toMatchObject({ near: 8, targets: 17, loss: 2.5, near_loss: 3, gain: 0.5, error: 0 });
    expect(gain.result()!.by_position).toEqual([
      { from: 8, to: 16, targets: 8 + 5, gain: 0.5 },
      { from: 16, to: 32, targets: 4, gain: 0.5 },
    ]);
  });

  it('has the standard error of the mean over sequences', () => {
    const gains = [0.1, 0.5, 0.3, 0.7];
    const gain = new FarContextGain(4, ({ targets }) => Array.from(targets, () => 1));
    for (const value of gains) gain.add(batchOf(new Array(10).fill(1), [0, 10]), new Array(10).fill(1 - value));
    const { gain: mean, error } = gain.result()!;
    expect(mean).toBeCloseTo(0.4, 9);
    const deviation = Math.sqrt(gains.reduce((sum, value) => sum + (value - 0.4) ** 2, 0) / 3);
    expect(error).toBeCloseTo(deviation / 2, 9);
    expect(new FarContextGain(20, () => []).result()).toBeNull();
  });

  describe('of models', () => {
    const models: LanguageModel[] = [];
    afterAll(() => {
      for (const model of models) model.free();
    });
    const gainOf = (sections: Parameters<typeof tinyConfig>[0], near: number) => {
      const config = tinyConfig(sections);
      const model = tinyModel(config);
      models.push(model);
      const uploader = new BatchUploader(model.device, config.nsa);
      const losses = (given: Pick<Batch, 'inputs' | 'targets' | 'cuSeqlens'>) => {
        const batch = uploader.upload(given);
        const values = model.losses(batch.ids, batch.targets, { lengths: batch.sequences });
        const read = Float32Array.from(values.read());
        values.free();
        uploader.release(batch);
        return read;
      };
      const batch = batchOf(INPUTS, [0, 150]);
      const gain = new FarContextGain(near, losses);
      gain.add(batch, losses(batch));
      uploader.free();
      return gain.result()!;
    };
    // No positions, so that a token is the same wherever its piece begins.
    const still = { dim: 16, n_layers: 1, rope_scale: 1e9 };

    it('is 0 for one that reads no further than the cut', () => {
      // One layer of a window of 6 tokens sees nothing beyond.
      const { gain, by_position } = gainOf({ model: still, nsa: { w: 6, force_branch: 'win' } }, 12);
      expect(Math.abs(gain)).toBeLessThan(1e-5);
      for (const row of by_position) expect(Math.abs(row.gain)).toBeLessThan(1e-5);
    });

    it('is not 0 for one that reads everything', () => {
      expect(Math.abs(gainOf({ model: { ...still, attention: 'dense' } }, 12).gain)).toBeGreaterThan(1e-3);
    });
  });
});
