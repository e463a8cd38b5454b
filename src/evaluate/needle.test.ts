import { describe, expect, it } from 'vitest';
import { fitTask, needleVocabulary } from '../data/synthetic/needle.js';
import { lastLogits } from '../infer/decode.js';
import { tinyConfig, tinyModel } from '../infer/testing/tiny-model.js';
import type { LanguageModel } from '../model/language-model.js';
import { Tape } from '../tensor/tape.js';
import { caseTokens, evaluateNeedle, type NeedleGrid } from './needle.js';
import { withoutBranch } from './without-branch.js';

const VOCABULARY = 32;
const GRID: NeedleGrid = {
  lengths: [40, 96],
  depths: [0, 50, 100],
  trials: 30,
  records: 2,
  facts: 2,
  seed: 4,
};
const tiny = (vocabulary = VOCABULARY, nsa: object = {}) =>
  tinyModel(tinyConfig({ nsa, model: { dim: VOCABULARY } }), vocabulary);

/** The cases of a cell, by the generator alone. */
function casesOf(length: number, depth: number): Int32Array[] {
  const task = fitTask(
    { vocabSize: VOCABULARY, records: GRID.records, facts: GRID.facts, questions: 1, absent: 0 },
    length,
  );
  const first = GRID.depths.indexOf(depth) * GRID.trials;
  return Array.from({ length: GRID.trials }, (_, i) => caseTokens(task, length, depth, GRID.seed, first + i));
}

/** A model that only knows the last token, and after key k says the value of the same number. */
function guesser(): LanguageModel {
  const model = tiny();
  const { keys, values } = needleVocabulary(VOCABULARY);
  for (const { name, value } of model.parameters) {
    if (name.includes('norm')) continue;
    const [rows, columns] = value.shape;
    const said = (row: number) => (name === 'embedding' ? row : row - values + keys);
    const isTable = name === 'embedding' || name === 'head';
    // One direction for each token; nothing is added to it, and the head reads it.
    value.write(
      Float32Array.from({ length: value.size }, (_, i) =>
        isTable && rows === VOCABULARY && i % columns === said(Math.floor(i / columns)) ? 1 : 0,
      ),
    );
  }
  return model;
}

describe('evaluateNeedle', () => {
  it('counts the cases whose answer the model says, cell by cell', () => {
    const model = guesser();
    const { keys, values } = needleVocabulary(VOCABULARY);
    const cells = evaluateNeedle(model, GRID, {});
    expect(cells.map(({ length, depth }) => [length, depth])).toEqual(
      GRID.lengths.flatMap((length) => GRID.depths.map((depth) => [length, depth])),
    );
    for (const { length, depth, trials, correct, accuracy } of cells) {
      const right = casesOf(length, depth).filter((tokens) => tokens.at(-1)! - values === tokens.at(-2)! - keys);
      expect({ trials, correct, accuracy }).toEqual({
        trials: GRID.trials,
        correct: right.length,
        accuracy: right.length / GRID.trials,
      });
    }
    const all = cells.reduce((total, { correct }) => total + correct, 0);
    expect(all).toBeGreaterThan(20); // one in four by chance: 45 of 180
    expect(all).toBeLessThan(80);
    model.free();
  });

  it('says what greedy decoding would say, however cases are packed', () => {
    const model = tiny();
    const [length, depth] = [96, 50];
    const wanted = casesOf(length, depth).filter((tokens) => {
      const logits = [...lastLogits(model, [...tokens.subarray(0, -1)])];
      return logits.indexOf(Math.max(...logits)) === tokens.at(-1);
    }).length;
    const cell = evaluateNeedle(model, GRID, {}).find((one) => one.length === length && one.depth === depth);
    expect(cell?.correct).toBe(wanted);
    model.free();
  });

  it('tells in how many cases each layer selected the block of the answer', () => {
    const model = tiny(VOCABULARY, { n_sel: 3, l_sel: 4 }); // what is selected is the forced blocks alone
    const { count, keys, facts } = needleVocabulary(VOCABULARY);
    const cells = evaluateNeedle(model, GRID, {});
    for (const { length, depth, recall } of cells) {
      const forced = casesOf(length, depth).filter((tokens) => {
        const key = tokens[length - 2] - keys;
        const isAsked = (token: number) => token >= facts && Math.floor((token - facts) / count) === key;
        const [block, current] = [[...tokens].findIndex(isAsked), length - 2].map((at) => Math.floor(at / 4));
        return block === 0 || block >= current - 1;
      });
      const share = forced.length / GRID.trials;
      expect(recall).toEqual({ any: share, layers: [share, share] });
    }
    // Not trivial: at the ends always, in the middle where another record lies before or behind it.
    expect(cells.filter(({ depth }) => depth !== 50).every(({ recall }) => recall?.any === 1)).toBe(true);
    expect(cells.find(({ length, depth }) => length === 96 && depth === 50)?.recall?.any).toBe(0);
    model.free();
  });

  it('sees every block while all are selected, and knows no recall of dense attention', () => {
    const [all, dense] = [
      tiny(VOCABULARY, { n_sel: 64 }),
      tinyModel(tinyConfig({ model: { attention: 'dense', dim: VOCABULARY } }), VOCABULARY),
    ];
    for (const { recall } of evaluateNeedle(all, GRID, {})) {
      expect(recall?.any).toBe(1);
      expect(new Set(recall?.layers)).toEqual(new Set([1]));
    }
    for (const { recall } of evaluateNeedle(dense, GRID, {})) expect(recall).toBeNull();
    for (const one of [all, dense]) one.free();
  });

  it('tells how far it is', () => {
    const model = tiny();
    const seen: number[][] = [];
    evaluateNeedle(model, GRID, { onProgress: (done, all) => seen.push([done, all]) });
    expect(seen.at(-1)).toEqual([180, 180]);
    model.free();
  });

  it('refuses a length or a vocabulary that holds no record', () => {
    const [model, small] = [tiny(), tiny(6)];
    expect(() => evaluateNeedle(model, { ...GRID, lengths: [7] }, {})).toThrow('a sequence of 7 tokens is too short');
    expect(() => evaluateNeedle(small, GRID, {})).toThrow('a vocabulary of 6 has 1 keys, too few');
    for (const one of [model, small]) one.free();
  });
});

describe('withoutBranch', () => {
  /** Every gate of every layer, [..., 3]. */
  function gatesOf(model: LanguageModel): number[][] {
    const { device } = model;
    const tokens = Array.from({ length: 40 }, (_, i) => (i * i) % VOCABULARY);
    const tape = new Tape(device, { record: false });
    const seen: number[] = [];
    const observer = {
      gates: (_: number, gates: { read(): ArrayLike<number> }) => seen.push(...Array.from(gates.read())),
    };
    model.logits(tape, tape.from(tokens, [tokens.length], 'i32'), [0], { lengths: [tokens.length], observer });
    tape.end();
    return Array.from({ length: seen.length / 3 }, (_, row) => seen.slice(3 * row, 3 * row + 3));
  }

  it.each([
    ['softmax', 'sel', 1],
    ['sigmoid', 'cmp', 0],
    ['sigmoid', 'win', 2],
  ] as const)('a %s gate of %s is exactly 0, and is itself again afterwards', (gate, branch, column) => {
    const model = tiny(VOCABULARY, { gate });
    const before = gatesOf(model);
    const during = withoutBranch(model, branch, () => gatesOf(model));
    for (const [row, gates] of during.entries()) {
      expect(gates[column]).toBe(0);
      const left = before[row].filter((_, i) => i !== column);
      const share = gate === 'softmax' ? left[0] + left[1] : 1;
      for (const [i, value] of gates.filter((_, at) => at !== column).entries())
        expect(value).toBeCloseTo(left[i] / share, 5);
    }
    expect(gatesOf(model)).toEqual(before);
    model.free();
  });

  it('refuses models whose gates cannot be changed', () => {
    const dense = tinyModel(tinyConfig({ model: { attention: 'dense' } }));
    expect(() => withoutBranch(dense, 'sel', () => 0)).toThrow('no branches to switch off');
    const forced = tiny(VOCABULARY, { force_branch: 'win' });
    expect(() => withoutBranch(forced, 'sel', () => 0)).toThrow('nsa.force_branch');
    for (const one of [dense, forced]) one.free();
  });
});
