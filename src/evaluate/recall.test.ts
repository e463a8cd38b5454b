import { describe, expect, it } from 'vitest';
import { createTokenizer } from '../data/tokenizer.js';
import { answerRecalls, type Predict, recallRows, recallStory } from './recall.js';

const tokenizer = createTokenizer('stories');
const stories = Array.from({ length: 30 }, (_, number) => recallStory(tokenizer, 7, number, number % 13));
const distances = [0, 64, 256, 1024];
const score = (predict: Predict, at = distances) => recallRows(answerRecalls(stories, predict), at);

/** Predicts by looking at the token that is to be predicted. */
const cheat: Predict = (asked) =>
  asked.map(({ tokens, positions }) => positions.map((position) => tokens[position + 1]));

describe('recall', () => {
  it('knows the token of every answer and of its fact', () => {
    for (const { tokens, cases, story } of stories) {
      expect(cases).toHaveLength(story.recalls.length);
      for (const { at, factAt, length, recall } of cases) {
        expect(tokenizer.decode(tokens.subarray(at, at + length))).toBe(recall.answer);
        expect(tokenizer.decode(tokens.subarray(at - 1, at))).toBe(` The ${recall.thing}`);
        expect(tokenizer.decode(tokens.subarray(factAt, factAt + 1))).toBe(` the ${recall.thing} ${recall.place}`);
        expect(at).toBeGreaterThan(factAt);
      }
    }
  });

  it('gives a model that knows the answers 100 % at every distance, and counts every case once', () => {
    const rows = score(cheat);
    expect(rows.map(({ accuracy }) => accuracy)).toEqual([1, 1, 1]);
    expect(rows.reduce((sum, row) => sum + row.cases, 0)).toBe(stories.flatMap(({ cases }) => cases).length);
    for (const { from, to, cases } of rows) {
      const near = stories
        .flatMap((story) => story.cases)
        .filter(({ at, factAt }) => at - factAt >= from && at - factAt < to);
      expect(cases).toBe(near.length);
    }
  });

  it('gives a model that guesses one of the places about chance', () => {
    const places = [...new Set(stories.flatMap(({ story }) => story.recalls.map(({ answer }) => answer)))];
    let next = 0;
    const guess: Predict = (asked) =>
      asked.map(({ positions }) => positions.map(() => tokenizer.encode(places[next++ % places.length])[0]));
    const [{ accuracy, cases }] = score(guess, [0, 1024]);
    expect(cases).toBeGreaterThan(100);
    expect(accuracy).toBeGreaterThan(0.4 / places.length);
    expect(accuracy).toBeLessThan(2 / places.length);
  });

  it('gives a model that is wrong about everything 0 %', () => {
    const wrong: Predict = (asked) => asked.map(({ positions }) => positions.map(() => 0));
    expect(score(wrong, [0, 1024])[0].correct).toBe(0);
  });
});
