import { afterAll, describe, expect, it } from 'vitest';
import { UsageError } from '../errors.js';
import type { LanguageModel } from '../model/language-model.js';
import { inspectSelection, rateByDistance, sharesByBlock } from './selection.js';
import { tinyConfig, tinyModel } from './testing/tiny-model.js';

const models: LanguageModel[] = [];
afterAll(() => {
  for (const model of models) model.free();
});
function made(sections: Parameters<typeof tinyConfig>[0] = {}): LanguageModel {
  const model = tinyModel(tinyConfig(sections));
  models.push(model);
  return model;
}
const TOKENS = Array.from({ length: 85 }, (_, i) => (i * i * 7) % 256);

describe('what a model looks at', () => {
  it('counts selected blocks by their distance, of those there are', () => {
    // Blocks of 2, one group: tokens 0,1 | 2,3 | 4
    const selected = [0, -1, 0, -1, 0, 1, 0, 1, 0, 2];
    expect(rateByDistance(selected, 5, 1, { lSel: 2, nSel: 2 })).toEqual([1, 2 / 3, 1]);
  });

  it('averages normalised gates by position', () => {
    const gates = [1, 1, 2, 3, 1, 0, 5, 5, 0];
    expect(sharesByBlock(gates, 3, 1, 2)).toEqual([
      { cmp: (0.25 + 0.75) / 2, sel: 0.25, win: 0.25 },
      { cmp: 0.5, sel: 0.5, win: 0 },
    ]);
  });

  it('always selects its own block and the one before, and has as many blocks as slots', () => {
    const layers = inspectSelection(made({ nsa: { n_sel: 5 } }), TOKENS);
    expect(layers.map(({ layer }) => layer)).toEqual([0, 1]);
    for (const { rate_by_distance: rates, gates, gates_by_block } of layers) {
      expect(rates).toHaveLength(11);
      expect(rates.slice(0, 2)).toEqual([1, 1]);
      expect(rates[10]).toBe(1); // only the last block is so far from block 0, which is always selected
      expect(Math.min(...rates)).toBeGreaterThanOrEqual(0);
      expect(rates.slice(2, 10).some((rate) => rate > 0 && rate < 1)).toBe(true);
      expect(gates.cmp + gates.sel + gates.win).toBeCloseTo(1, 5);
      expect(gates_by_block).toHaveLength(11);
    }
  });

  it('shows a gate that was forced', () => {
    const [{ gates }] = inspectSelection(made({ nsa: { force_branch: 'sel' } }), TOKENS);
    expect(gates.cmp).toBe(0);
    expect(gates.sel).toBeCloseTo(1, 6);
  });

  it('dense attention selects nothing', () => {
    const dense = made({ model: { attention: 'dense' } });
    expect(() => inspectSelection(dense, TOKENS)).toThrow(UsageError);
  });
});
