import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { answerPositions, fitTask, type NeedleTask, NeedleWriter, NumberStream, needleVocabulary } from './needle.js';

const TASK: NeedleTask = { vocabSize: 256, records: 4, pairs: 3, questions: 5 };

function sequence(task: NeedleTask, length: number, id = 0, depth?: number): number[] {
  const tokens = new Int32Array(length);
  new NeedleWriter(task).write(new NumberStream(1, id), tokens, depth);
  return [...tokens];
}

/** What somebody reads who knows how sequences are built: the records, in order, and the questions. */
function parse(tokens: readonly number[], task: NeedleTask) {
  const { keys, values } = needleVocabulary(task.vocabSize);
  const isKey = (token: number) => token >= keys && token < values;
  const haystack = tokens.length - 2 * task.questions;
  const pairs = new Map<number, { value: number; at: number }>();
  for (let at = 0; at < haystack; at++) {
    if (!isKey(tokens[at])) continue;
    expect(pairs.has(tokens[at]), 'a key twice').toBe(false);
    pairs.set(tokens[at], { value: tokens[at + 1], at });
  }
  const questions = Array.from({ length: task.questions }, (_, i) => ({
    key: tokens[haystack + 2 * i],
    answer: tokens[haystack + 2 * i + 1],
  }));
  return { pairs, questions };
}

describe('NeedleWriter', () => {
  it('hides every pair once, whole, and asks for different ones with the right answers', () => {
    fc.assert(
      fc.property(
        fc.record({
          length: fc.integer({ min: 64, max: 600 }),
          vocabSize: fc.integer({ min: 64, max: 1000 }),
          records: fc.integer({ min: 1, max: 9 }),
          pairs: fc.integer({ min: 1, max: 7 }),
          questions: fc.integer({ min: 1, max: 30 }),
          id: fc.nat(),
        }),
        ({ length, id, ...asked }) => {
          const task = fitTask(asked, length);
          const tokens = sequence(task, length, id);
          const { pairs, questions } = parse(tokens, task);
          expect(pairs.size).toBe(task.records * task.pairs);
          expect(new Set(questions.map(({ key }) => key)).size).toBe(task.questions);
          for (const { key, answer } of questions) expect(pairs.get(key)?.value).toBe(answer);
          const { values } = needleVocabulary(task.vocabSize);
          for (const { value } of pairs.values()) expect(value).toBeGreaterThanOrEqual(values);
          for (const position of answerPositions(task, length)) expect(tokens[position]).toBeGreaterThanOrEqual(values);
          expect(Math.max(...tokens)).toBeLessThan(task.vocabSize);
          // Nothing but records and questions looks like a value.
          expect(tokens.filter((token) => token >= values)).toHaveLength(pairs.size + task.questions);
        },
      ),
      { numRuns: 200 },
    );
  });

  it('keeps the pairs of a record together', () => {
    const places = [...parse(sequence(TASK, 400), TASK).pairs.values()].map(({ at }) => at);
    for (let record = 0; record < TASK.records; record++) {
      const [first, ...others] = places.slice(record * TASK.pairs, (record + 1) * TASK.pairs);
      expect(others).toEqual([first + 2, first + 4]);
    }
  });

  it.each([0, 0.25, 0.5, 1])('puts the record that is asked for at depth %f', (depth) => {
    const task = { ...TASK, questions: 1 };
    const [length, asked] = [1000, [] as number[]];
    for (let id = 0; id < 200; id++) {
      const { pairs, questions } = parse(sequence(task, length, id, depth), task);
      const { at } = pairs.get(questions[0].key)!;
      asked.push(at);
    }
    // The other records and the place in the record move it by at most their own lengths.
    const [record, noise] = [2 * task.pairs, length - 2 * (task.records * task.pairs + 1)];
    for (const at of asked) {
      expect(at).toBeGreaterThanOrEqual(Math.round(depth * noise));
      expect(at).toBeLessThan(Math.round(depth * noise) + task.records * record);
    }
  });

  it('spreads records and questions evenly where no depth is asked for', () => {
    const task = { ...TASK, questions: 1 };
    const [tenths, length] = [new Array<number>(10).fill(0), 1000];
    for (let id = 0; id < 2000; id++) {
      const { pairs, questions } = parse(sequence(task, length, id), task);
      tenths[Math.floor((10 * pairs.get(questions[0].key)!.at) / length)]++;
    }
    const chiSquared = tenths.reduce((sum, count) => sum + (count - 200) ** 2 / 200, 0);
    expect(chiSquared).toBeLessThan(9 + 5 * Math.sqrt(18));
  });

  it('depends on the stream and on nothing else, not on what was written before', () => {
    const [writer, again] = [new NeedleWriter(TASK), new Int32Array(300)];
    for (const id of [1, 2, 3, 7]) writer.write(new NumberStream(1, id), again);
    expect([...again]).toEqual(sequence(TASK, 300, 7));
    expect(sequence(TASK, 300, 7)).toEqual(sequence(TASK, 300, 7));
    const equal = sequence(TASK, 300, 8).filter((token, i) => token === sequence(TASK, 300, 7)[i]);
    expect(equal.length).toBeLessThan(20);
  });
});

describe('fitTask', () => {
  it('asks for less where a sequence is short or keys are few', () => {
    expect(fitTask(TASK, 400)).toEqual(TASK);
    expect(fitTask(TASK, 48)).toEqual({ ...TASK, records: 2 });
    expect(fitTask(TASK, 24)).toEqual({ ...TASK, records: 1, questions: 3 });
    expect(fitTask({ ...TASK, vocabSize: 32 }, 400)).toEqual({ ...TASK, vocabSize: 32, records: 2 });
  });

  it('names what is too small', () => {
    expect(() => fitTask(TASK, 23)).toThrow('a sequence of 23 tokens is too short for a record of 3 pairs');
    expect(() => fitTask({ ...TASK, vocabSize: 8 }, 400)).toThrow(
      'a vocabulary of 8 has 2 keys for a record of 3 pairs',
    );
  });
});

describe('NumberStream', () => {
  it('is uniform, neighbours and neighbouring streams included', () => {
    const [single, pairs, across] = [16, 256, 256].map((size) => new Float64Array(size));
    for (let id = 0; id < 200; id++) {
      const [one, two] = [new NumberStream(5, id), new NumberStream(5, id + 1)];
      let before = one.below(16);
      for (let i = 0; i < 500; i++) {
        const value = one.below(16);
        single[value]++;
        pairs[16 * before + value]++;
        across[16 * value + two.below(16)]++;
        before = value;
      }
    }
    // Mean k, standard deviation sqrt(2k) for k degrees of freedom; five deviations are allowed.
    for (const counts of [single, pairs, across]) {
      const expected = 100_000 / counts.length;
      const chiSquared = counts.reduce((sum, count) => sum + (count - expected) ** 2 / expected, 0);
      expect(chiSquared).toBeLessThan(counts.length - 1 + 5 * Math.sqrt(2 * counts.length));
    }
  });
});
