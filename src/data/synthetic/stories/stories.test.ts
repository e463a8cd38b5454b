import { describe, expect, it } from 'vitest';
import { IGNORED_TARGET, packBatch } from '../../batch.js';
import { Purpose } from '../../hash.js';
import { createTokenizer } from '../../tokenizer.js';
import { NumberStream } from '../number-stream.js';
import { writeDrill, writeStory } from './grammar.js';
import { StorySamples } from './samples.js';
import { PLACES, THINGS } from './words.js';

const tokenizer = createTokenizer('stories');
const stories = Array.from({ length: 60 }, (_, number) => writeStory(new NumberStream(5, number), number % 13));
const count = (text: string, part: string) => text.split(part).length - 1;

describe('story grammar', () => {
  it('writes the same story for the same number, and another one for another', () => {
    expect(writeStory(new NumberStream(5, 3), 3)).toEqual(stories[3]);
    expect(new Set(stories.map(({ text }) => text)).size).toBe(stories.length);
  });

  it('fills every slot and ends every story', () => {
    for (const { text } of stories) {
      expect(text).not.toMatch(/[{}|]|undefined| {2}/);
      expect(text).toMatch(/The end\.$/);
    }
  });

  it('can answer every recall from exactly one earlier fact', () => {
    for (const { text, recalls } of stories) {
      expect(recalls.length).toBeGreaterThanOrEqual(3);
      for (const { thing, place, answer, at, factAt } of recalls) {
        // The thing and the place are each named twice: in the fact, and then in the recall.
        const fact = ` the ${thing} ${place}`;
        expect(count(text, thing)).toBe(2);
        expect(count(text, place)).toBe(2);
        expect(text.indexOf(fact)).toBe(factAt);
        expect(text.indexOf(` The ${thing}${answer}.`)).toBe(at - thing.length - 5);
        expect(at).toBeGreaterThan(factAt);
        expect(answer).toBe(` was ${place}`);
      }
      const mentioned = THINGS.filter((thing) => text.includes(thing));
      expect(mentioned).toHaveLength(recalls.length);
      expect(PLACES.filter((place) => text.includes(place))).toHaveLength(recalls.length);
    }
  });

  it('has recalls at many distances', () => {
    const distances = stories.flatMap(({ recalls }) => recalls.map(({ at, factAt }) => at - factAt));
    expect(Math.min(...distances)).toBeLessThan(200);
    expect(Math.max(...distances)).toBeGreaterThan(1200);
  });

  it('recalls every fact of a drill three times', () => {
    const { text, recalls } = writeDrill(new NumberStream(5, 1), 1);
    for (const { thing, place } of recalls) {
      expect(count(text, ` the ${thing} ${place}`)).toBe(1);
      expect(count(text, ` The ${thing} was ${place}.`)).toBe(3);
    }
    expect(recalls.length).toBeGreaterThanOrEqual(6);
  });
});

describe('tokenizer stories', () => {
  it('has a token for every word of the grammar, and decodes what it encodes', () => {
    for (const { text } of stories) {
      const tokens = tokenizer.encode(text);
      expect(tokenizer.decode(tokens)).toBe(text);
      // Bytes are left for single characters only: punctuation, ends of paragraphs and the words A and I.
      for (const token of tokens) if (token < 256) expect(tokenizer.decode([token])).toMatch(/^[.,!?"\nAI]$/);
    }
  });

  it('encodes any other text in bytes', () => {
    const text = 'Grüße, 1 + 1 = 2\tΩ 🙂 the red kitesurfer';
    expect(tokenizer.decode(tokenizer.encode(text))).toBe(text);
    expect(tokenizer.encode('').length).toBe(0);
    expect(Array.from(tokenizer.encode(' the red kite under the bridge'))).toHaveLength(1);
    expect(tokenizer.encode(' the red kite under the bridges').length).toBeGreaterThan(2);
  });
});

describe('story samples', () => {
  const create = (drills: number, sequenceLength = 512) =>
    new StorySamples(tokenizer, { sequenceLength, drills }, 1, Purpose.storiesTrain);
  const window = (samples: StorySamples, index: number, length = 513) => {
    const tokens = new Int32Array(length);
    samples.read(samples.locate(index), tokens);
    return tokens;
  };

  it('gives the same sample whenever it is read, and different ones for different numbers', () => {
    const [first, second] = [create(0), create(0)];
    for (const index of [7, 3, 7]) expect(window(first, index)).toEqual(window(second, index));
    expect(window(first, 1)).not.toEqual(window(first, 2));
  });

  it('begins every document after a separator, and fills short sequences too', () => {
    const samples = create(0);
    for (let index = 0; index < 20; index++) {
      const tokens = window(samples, index);
      const starts = samples.documentStarts(samples.locate(index));
      expect(starts[0]).toBe(0);
      for (const start of starts.slice(1)) expect(tokens[start - 1]).toBe(tokenizer.separator);
      expect(tokens.filter((token) => token === tokenizer.separator).length).toBeGreaterThanOrEqual(starts.length - 1);
    }
    expect(window(create(0, 16), 0, 17).every((token) => token > 0)).toBe(true);
  });

  it('has three drills in four samples, which grow, and counts their answers only', () => {
    const samples = create(4);
    const counted = (index: number) => {
      const targets = window(samples, index).slice(1);
      samples.maskTargets(samples.locate(index), targets);
      return targets.filter((target) => target !== IGNORED_TARGET);
    };
    for (const index of [0, 1, 2, 4, 5, 6])
      for (const target of counted(index)) expect(tokenizer.decode([target])).toMatch(/^ was /);
    expect(counted(0).length).toBeGreaterThan(60);
    for (const index of [3, 7]) expect(counted(index)).toHaveLength(512);
    expect(counted(4).length).toBeLessThan(counted(0).length);
    expect(Array.from(create(0).documentStarts(samples.locate(4)))).not.toEqual(
      samples.documentStarts(samples.locate(4)),
    );
  });

  it('packs into batches in which no story sees another', () => {
    const samples = create(0);
    const batch = packBatch(samples, [samples.locate(0)], { sequenceLength: 512, documentMask: true });
    const starts = samples.documentStarts(samples.locate(0)).filter((start) => start < 512);
    expect(Array.from(batch.cuSeqlens)).toEqual([...starts, 512]);
    for (const start of starts.slice(1)) expect(batch.targets[start - 1]).toBe(IGNORED_TARGET);
  });
});
