import { afterAll, describe, expect, it } from 'vitest';
import type { LanguageModel } from '../../model/language-model.js';
import { randomValues, relativeError } from '../../testing/numbers.js';
import { lastLogits } from '../decode.js';
import { Comparison, selectionMargin } from './comparison.js';
import { ReplayWeights, type Rounding, StepReplay, type TokenSelection, toBf16, unrounded } from './step-replay.js';
import { tinyConfig, tinyModel } from './tiny-model.js';

const LENGTH = 70;
const BLOCKS = 20;
const L_SEL = 32;
const models: LanguageModel[] = [];
afterAll(() => {
  for (const model of models) model.free();
});

/** With weights that bf16 holds, on the CPU; every block is selected. */
function made(nsa: object = {}): LanguageModel {
  const config = tinyConfig({
    model: { dim: 64, n_heads: 4, n_kv_groups: 2, d_k: 32, d_v: 32 },
    nsa: { l: 8, d: 4, l_sel: L_SEL, n_sel: BLOCKS, w: 50, ...nsa },
  });
  const model = tinyModel(config);
  for (const { value } of model.parameters) value.write(toBf16(Float64Array.from(value.read())));
  models.push(model);
  return model;
}

const tokens = Array.from({ length: LENGTH }, (_, i) => (i * i * 7 + i * 91 + 1) % 256);
function every(at: number): TokenSelection {
  const blocks = Array.from({ length: BLOCKS }, (_, j) => (j <= at / L_SEL ? j : -1));
  return [
    [blocks, blocks],
    [blocks, blocks],
  ];
}

describe('a replay in float64', () => {
  for (const [name, nsa] of Object.entries({
    avg: {},
    'conv, rotated before': { phi: 'conv', cmp_rope: 'before', gate: 'sigmoid' },
    'not rotated, no overlap': { cmp_rope: 'none', d: 8 },
  }))
    it(`is what the CPU computes where every block is selected: ${name}`, () => {
      const model = made(nsa);
      const replay = new StepReplay(new ReplayWeights(model), unrounded);
      tokens.forEach((token, at) => {
        const { logits } = replay.next(token, every(at));
        if (at % 23 !== 0) return;
        const after = (last: number) => lastLogits(model, [...tokens.slice(0, at), last]);
        expect(relativeError(after(token), logits), `token ${at}`).toBeLessThan(2e-5);
        // Another token would be seen.
        expect(relativeError(after(token + 1), logits), `token ${at}`).toBeGreaterThan(0.3);
      });
    });
});

describe('the margin of a selection', () => {
  const score = [0.9, 0.5, 0.1, 0.48, 0.3, 0.7, 0.2, 0.6];
  it('tells a near tie from another selection', () => {
    expect(selectionMargin(score, [0, 1, 5, 6, 7])).toBe(0);
    expect(selectionMargin(score, [0, 3, 5, 6, 7])).toBeCloseTo(Math.log(0.5 / 0.48));
    expect(selectionMargin(score, [0, 2, 5, 6, 7])).toBeCloseTo(Math.log(5));
    expect(selectionMargin(score, [1, 3, 5, 6, 7])).toBe(Number.POSITIVE_INFINITY); // block 0 is forced
    expect(selectionMargin(score, [0, 1, 6, 7, -1])).toBe(Number.POSITIVE_INFINITY); // one is missing
    expect(selectionMargin([0.5, 0.2], [0, 1, -1, -1, -1])).toBe(0);
  });
});

describe('a comparison', () => {
  /** A device that reads `read` and stores numbers as `round` says. */
  const compare = (round: Rounding, read: readonly number[] = tokens) => {
    const weights = new ReplayWeights(made());
    const device = new StepReplay(weights, round);
    const comparison = new Comparison(weights);
    tokens.forEach((token, at) => {
      const { logits } = device.next(read[at], every(at));
      comparison.next(token, every(at), `token ${at}`, at < 20 ? null : logits);
    });
    comparison.finish('all');
    return comparison.findings;
  };

  it('accepts other roundings to bf16', () => {
    let seed = 0;
    // As far off before the rounding as sums in another order may be: about half of the numbers are rounded otherwise.
    const otherwise: Rounding = (values) => {
      seed += 1;
      const random = randomValues(values.length, seed);
      return toBf16(values.map((value, i) => value * (1 + random[i] * 2 ** -10)));
    };
    expect(compare(otherwise).ratio).toBeGreaterThan(0.5);
  });

  it('refuses two bits less', () => {
    const coarse: Rounding = (values) =>
      values.map((value) => {
        if (value === 0) return 0;
        const unit = 2 ** (Math.floor(Math.log2(Math.abs(value))) - 5);
        return Math.round(value / unit) * unit;
      });
    expect(() => compare(coarse)).toThrow('times');
  });

  it('refuses an earlier token that is another', () => {
    expect(() => compare(toBf16, tokens.with(10, 7))).toThrow('times what rounding to bf16 does');
  });
});
