import { describe, expect, it } from 'vitest';
import fc from '../../testing/properties.js';
import { answerPositions, fitTask, type NeedleTask, NeedleWriter, NOTHING, needleVocabulary } from './needle.js';
import { NumberStream } from './number-stream.js';

const TASK: NeedleTask = { vocabSize: 256, records: 3, facts: 3, questions: 5, absent: 0 };

function sequence(task: NeedleTask, length: number, id = 0, depth?: number): number[] {
  const tokens = new Int32Array(length);
  new NeedleWriter(task).write(new NumberStream(1, id), tokens, depth);
  return [...tokens];
}

/** Parses a sequence by the rules that built it: the facts of the haystack, and the questions. */
function parse(tokens: readonly number[], task: NeedleTask) {
  const { facts: first, count, keys, values } = needleVocabulary(task.vocabSize);
  const haystack = tokens.length - 2 * task.questions;
  const facts = new Map<number, { value: number; at: number }>();
  for (let at = 0; at < haystack; at++) {
    if (tokens[at] >= keys && tokens[at] < first) throw new Error('a key or a value in the haystack');
    if (tokens[at] < first) continue;
    const [key, value] = [Math.floor((tokens[at] - first) / count), (tokens[at] - first) % count];
    if (facts.has(key)) throw new Error('a key twice');
    facts.set(key, { value, at });
  }
  const questions = Array.from({ length: task.questions }, (_, i) => ({
    key: tokens[haystack + 2 * i] - keys,
    answer: tokens[haystack + 2 * i + 1] - values,
  }));
  return { facts, questions };
}

describe('NeedleWriter', () => {
  it('hides every fact once and asks for different ones, with the right answers', () => {
    fc.assert(
      fc.property(
        fc.record({
          length: fc.integer({ min: 64, max: 600 }),
          vocabSize: fc.integer({ min: 128, max: 2000 }),
          records: fc.integer({ min: 1, max: 9 }),
          facts: fc.integer({ min: 1, max: 7 }),
          questions: fc.integer({ min: 1, max: 30 }),
          absent: fc.constant(0),
          id: fc.nat(),
        }),
        ({ length, id, ...asked }) => {
          const task = fitTask(asked, length);
          const tokens = sequence(task, length, id);
          const { facts, questions } = parse(tokens, task);
          expect(facts.size).toBe(task.records * task.facts);
          expect(new Set(questions.map(({ key }) => key)).size).toBe(task.questions);
          for (const { key, answer } of questions) expect(facts.get(key)?.value).toBe(answer);
          const { values, facts: first } = needleVocabulary(task.vocabSize);
          for (const position of answerPositions(task, length)) {
            expect(tokens[position]).toBeGreaterThanOrEqual(values);
            expect(tokens[position]).toBeLessThan(first);
          }
          expect(Math.max(...tokens)).toBeLessThan(task.vocabSize);
        },
      ),
      { numRuns: 200 },
    );
  });

  it('asks for absent keys too, in any order, and answers that there is nothing', () => {
    const task = fitTask({ ...TASK, records: 9, questions: 7, absent: 3 }, 400);
    const { count, keys, values } = needleVocabulary(task.vocabSize);
    expect(task).toMatchObject({ records: Math.floor((count - 3) / 3), absent: 3 });
    const isNothing: boolean[][] = [];
    for (let id = 0; id < 100; id++) {
      const tokens = sequence(task, 400, id);
      const { facts, questions } = parse(tokens, task);
      expect(new Set(questions.map(({ key }) => key)).size).toBe(7);
      for (const { key, answer } of questions) expect(answer).toBe(facts.get(key)?.value ?? NOTHING - values);
      isNothing.push(questions.map(({ key }) => !facts.has(key)));
      expect(isNothing[id].filter(Boolean)).toHaveLength(3);
      // It is an answer and nothing else.
      expect(tokens.slice(0, 400 - 14)).not.toContain(NOTHING);
      for (const at of [0, 2, 4]) expect(tokens[400 - 14 + at]).toBeGreaterThanOrEqual(keys);
    }
    for (let question = 0; question < 7; question++) {
      const often = isNothing.filter((sequenceOf) => sequenceOf[question]).length;
      expect(often).toBeGreaterThan(20); // 3 of 7 questions: 43 of 100
      expect(often).toBeLessThan(66);
    }
  });

  it('keeps room for absent keys, and at least one question that has an answer', () => {
    expect(fitTask({ ...TASK, questions: 2, absent: 5 }, 400)).toMatchObject({ questions: 2, absent: 1 });
    // A short sequence has a record of three facts: four questions as three of four have an answer, but not in twelve tokens.
    const asked = { ...TASK, questions: 8, absent: 2 };
    expect(fitTask(asked, 16)).toMatchObject({ records: 1, questions: 4, absent: 1 });
    expect(fitTask({ ...asked, absent: 6 }, 12)).toMatchObject({ records: 1, questions: 4, absent: 3 });
    // More questions than there are keys: the share is that of the questions there can be.
    expect(fitTask({ ...TASK, questions: 64, absent: 2 }, 400)).toMatchObject({ records: 3, questions: 11, absent: 2 });
    expect(fitTask({ ...TASK, questions: 64, absent: 2 }, 24)).toMatchObject({ records: 2, questions: 7, absent: 1 });
    expect(() => fitTask({ ...TASK, absent: 9 }, 400)).toThrow('11 keys, too few for a record of 3 facts and 9');
  });

  it('keeps the facts of a record together', () => {
    const places = [...parse(sequence(TASK, 400), TASK).facts.values()].map(({ at }) => at);
    for (let record = 0; record < TASK.records; record++) {
      const [first, ...others] = places.slice(record * TASK.facts, (record + 1) * TASK.facts);
      expect(others).toEqual([first + 1, first + 2]);
    }
  });

  it.each([0, 0.25, 0.5, 1])('puts the record that is asked for at depth %f', (depth) => {
    const task = { ...TASK, questions: 1 };
    const length = 1000;
    const noise = length - task.records * task.facts - 2;
    for (let id = 0; id < 200; id++) {
      const { facts, questions } = parse(sequence(task, length, id, depth), task);
      const { at } = facts.get(questions[0].key)!;
      // The other records and the place in the record move it by at most their own lengths.
      expect(at).toBeGreaterThanOrEqual(Math.round(depth * noise));
      expect(at).toBeLessThan(Math.round(depth * noise) + task.records * task.facts);
    }
  });

  it('spreads records and questions evenly where no depth is asked for', () => {
    const task = { ...TASK, questions: 1 };
    const [tenths, length] = [new Array<number>(10).fill(0), 200];
    for (let id = 0; id < 2000; id++) {
      const { facts, questions } = parse(sequence(task, length, id), task);
      tenths[Math.floor((10 * facts.get(questions[0].key)!.at) / length)]++;
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
    expect(fitTask(TASK, 24)).toEqual({ ...TASK, records: 2 });
    expect(fitTask(TASK, 12)).toEqual({ ...TASK, records: 1, questions: 3 });
    expect(fitTask({ ...TASK, vocabSize: 72 }, 400)).toEqual({ ...TASK, vocabSize: 72, records: 2 });
  });

  it('names what is too small', () => {
    expect(() => fitTask(TASK, 11)).toThrow('a sequence of 11 tokens is too short for a record of 3 facts');
    expect(() => fitTask({ ...TASK, vocabSize: 9 }, 400)).toThrow('a vocabulary of 9 has 2 keys, too few');
  });
});

describe('needleVocabulary', () => {
  it.each([2048, 128, 100, 33])('of %i tokens has a fact for every key and value, and noise besides', (vocabSize) => {
    const { count, keys, values, facts } = needleVocabulary(vocabSize);
    expect([values - keys, facts - values, vocabSize - facts]).toEqual([count, count, count * count]);
    expect(count * count).toBeLessThanOrEqual(vocabSize / 2);
    expect(keys).toBeGreaterThan(0);
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
