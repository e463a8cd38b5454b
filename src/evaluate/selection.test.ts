import { afterAll, describe, expect, it } from 'vitest';
import { UsageError } from '../errors.js';
import { tinyConfig, tinyModel } from '../infer/testing/tiny-model.js';
import type { LanguageModel } from '../model/language-model.js';
import { inspectCoverage, inspectSelection, rateByDistance, sharesByBlock } from './selection.js';

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

  it('covers no more than the best choice, and everything when it reads every block', () => {
    const { layers, tokens } = inspectCoverage(made({ nsa: { n_sel: 5 } }), TOKENS, 20);
    expect(tokens).toBe(20);
    for (const { forced, random, chosen, best, groups, by_distance } of layers) {
      expect(groups).toHaveLength(2);
      expect(forced).toBeLessThan(random);
      expect(random).toBeLessThan(best);
      expect(chosen).toBeGreaterThan(forced);
      expect(chosen).toBeLessThanOrEqual(best);
      expect(best).toBeLessThan(1);
      expect(by_distance.reduce((sum, bin) => sum + bin.all, 0)).toBeCloseTo(1, 9);
    }
    expect(() => inspectCoverage(made({ nsa: { n_sel: 11 } }), TOKENS, 20)).toThrow('nothing to choose in 85 tokens');
  });

  it('dense attention has a best choice and none of its own, the same as that of sparse attention with its keys', () => {
    const sections = { model: { n_layers: 1 }, nsa: { n_sel: 5, shared_kv: true, cmp_rope: 'before' } } as const;
    const sparse = made(sections);
    const dense = made({ ...sections, model: { ...sections.model, attention: 'dense' } });
    for (const { name, value } of dense.parameters) {
      const same = sparse.parameters.find((other) => other.name === name)!;
      value.write(same.value.read());
    }
    const [a, b] = [inspectCoverage(dense, TOKENS, 20), inspectCoverage(sparse, TOKENS, 20)].map(
      ({ layers }) => layers[0],
    );
    expect(a.chosen).toBeNaN();
    expect(a.best).toBeCloseTo(b.best, 6);
    expect(a.random).toBeCloseTo(b.random, 6);
  });
});
