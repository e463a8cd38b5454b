import { describe, expect, it } from 'vitest';
import { IGNORED_TARGET } from '../batch.js';
import { createLoader, type LoaderOptions } from '../loader.js';
import { needleVocabulary } from './needle.js';
import { parseCurriculum } from './needle-samples.js';

const OPTIONS: LoaderOptions = {
  source: 'needle',
  tokenizer: 'byte',
  valFraction: 0.1,
  seed: 3,
  seqLen: 256,
  batchSize: 2,
  vocabSize: 128,
  needleRecords: 4,
  needleFacts: 2,
  needleQuestions: 6,
  needleAbsent: 0,
  needleCurriculum: '64:6,128:10',
};
const open = (changes: Partial<LoaderOptions> = {}) => createLoader({ ...OPTIONS, ...changes });

describe('source needle', () => {
  it('counts the answers alone, and keeps sequences apart', async () => {
    const loader = await open();
    const { inputs, targets, targetCount, cuSeqlens } = loader.next();
    expect(targets.filter((target) => target !== IGNORED_TARGET)).toHaveLength(targetCount);
    expect([...cuSeqlens]).toEqual(Array.from({ length: 9 }, (_, i) => 64 * i));
    const { keys, values, facts, count } = needleVocabulary(128);
    for (const [i, target] of targets.entries()) {
      if (target === IGNORED_TARGET) continue;
      expect(target).toBe(inputs[i + 1]);
      expect(target).toBeGreaterThanOrEqual(values);
      expect(target).toBeLessThan(facts);
      // The fact lies earlier in the same sequence.
      const fact = facts + (inputs[i] - keys) * count + target - values;
      expect([...inputs.subarray(64 * Math.floor(i / 64), i)]).toContain(fact);
    }
    expect(targetCount).toBe(8 * 6);
    loader.close();
  });

  it('lengthens by the number of samples, with as many tokens in every batch', async () => {
    const loader = await open();
    const lengths = Array.from({ length: 7 }, () => {
      const { cuSeqlens, inputs } = loader.next();
      expect(inputs).toHaveLength(512);
      return [...new Set(cuSeqlens.subarray(1).map((end, i) => end - cuSeqlens[i]))];
    });
    expect(lengths).toEqual([[64], [64], [64], [128], [128], [256], [256]]);
    loader.close();
  });

  it('mixes lengths in equal parts', async () => {
    const loader = await open({ needleCurriculum: '32+64+64+16:5', batchSize: 1 });
    const { cuSeqlens, targetCount } = loader.next();
    const lengths = [...cuSeqlens.subarray(1).map((end, i) => end - cuSeqlens[i])];
    expect(lengths).toEqual([32, 32, 64, 64, 16, 16, 16, 16]);
    // Four facts fit into 16 tokens; 32 and 64 hold enough for all six questions.
    expect(targetCount).toBe(2 * 6 + 2 * 6 + 4 * 4);
    loader.close();
  });

  it('gives two ranks what one gets, in the same order', async () => {
    const alone = await open({ batchSize: 4 });
    const ranks = await Promise.all([0, 1].map((rank) => open({ rank, world: 2 })));
    for (let step = 0; step < 4; step++) {
      const whole = alone.next();
      const parts = ranks.map((loader) => loader.next());
      expect([...whole.inputs]).toEqual(parts.flatMap(({ inputs }) => [...inputs]));
      expect([...whole.targets]).toEqual(parts.flatMap(({ targets }) => [...targets]));
    }
    for (const loader of [alone, ...ranks]) loader.close();
  });

  it('goes on exactly where it stopped, and refuses another task', async () => {
    const first = await open();
    for (let step = 0; step < 4; step++) first.next();
    const state = JSON.parse(JSON.stringify(first.state()));
    const second = await open();
    second.restore(state);
    for (let step = 0; step < 3; step++) expect(second.next()).toEqual(first.next());
    const other = await open({ needleCurriculum: null });
    expect(() => other.restore(state)).toThrow('holds other data');
    for (const loader of [first, second, other]) loader.close();
  });

  it('validates at the last length, on sequences that training does not have', async () => {
    const loader = await open();
    const [batch] = loader.evalBatches(1);
    expect([...batch.cuSeqlens]).toEqual([0, 256, 512]);
    const other = await open({ needleCurriculum: null });
    expect(batch.inputs).not.toEqual(other.next().inputs);
    for (const one of [loader, other]) one.close();
  });

  it('another seed is another haystack', async () => {
    const [one, two] = [await open(), await open({ seed: 4 })];
    const [a, b] = [one.next().inputs, two.next().inputs];
    expect(a.filter((token, i) => token === b[i]).length).toBeLessThan(50);
    for (const loader of [one, two]) loader.close();
  });
});

describe('parseCurriculum', () => {
  it('ends with whole samples', () => {
    const whole = { lengths: [256], until: Number.POSITIVE_INFINITY };
    expect(parseCurriculum(null, 256)).toEqual([whole]);
    expect(parseCurriculum(' 64:3 , 64 + 128:9', 256)).toEqual([
      { lengths: [64], until: 3 },
      { lengths: [64, 128], until: 9 },
      whole,
    ]);
  });

  it.each([
    ['64', '64 is not LENGTH:SAMPLES'],
    ['64:x', '64:x is not LENGTH:SAMPLES'],
    ['100:5', '100 does not divide train.seq_len 256'],
    ['64+256:5', '256 does not divide its share of train.seq_len, 128'],
    ['0:5', '0 does not divide train.seq_len 256'],
    ['64:5,128:5', 'the stage until 5 ends before it begins'],
  ])('%s is refused', (text, message) => expect(() => parseCurriculum(text, 256)).toThrow(message));
});
