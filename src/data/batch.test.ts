import { describe, expect, it } from 'vitest';
import { IGNORED_TARGET, packBatch, type Samples } from './batch.js';

/** Sample i is i*100, i*100 + 1, …; documents begin at fixed offsets. */
function samplesWith(starts: Record<number, number[]>): Samples {
  return {
    perEpoch: 10,
    locate: (index) => ({ id: index, epoch: 2, position: index }),
    read: ({ id }, window) => {
      for (let index = 0; index < window.length; index++) window[index] = id * 100 + index;
    },
    documentStarts: ({ id }) => starts[id] ?? [],
  };
}

const addresses = (samples: Samples, ...ids: number[]) => ids.map((id) => samples.locate(id));

describe('packBatch', () => {
  it('shifts targets by one and starts a sequence per row', () => {
    const samples = samplesWith({});
    const batch = packBatch(samples, addresses(samples, 1, 3), { sequenceLength: 3, documentMask: false });
    expect([...batch.inputs]).toEqual([100, 101, 102, 300, 301, 302]);
    expect([...batch.targets]).toEqual([101, 102, 103, 301, 302, 303]);
    expect([...batch.cuSeqlens]).toEqual([0, 3, 6]);
    expect(batch).toMatchObject({ sampleIds: [1, 3], epoch: 2, targetCount: 6 });
  });

  it('cuts at documents and ignores the first token of each as a target', () => {
    // Row 1: documents at the start (nothing to cut), inside, and at the last target (no cut, but ignored).
    const samples = samplesWith({ 1: [0, 2, 4], 3: [1] });
    const batch = packBatch(samples, addresses(samples, 1, 3), { sequenceLength: 4, documentMask: true });
    expect([...batch.cuSeqlens]).toEqual([0, 2, 4, 5, 8]);
    const I = IGNORED_TARGET;
    expect([...batch.targets]).toEqual([101, I, 103, I, I, 302, 303, 304]);
    expect([...batch.inputs]).toEqual([100, 101, 102, 103, 300, 301, 302, 303]);
    expect(batch.targetCount).toBe(5);
  });

  it('ignores documents without the mask', () => {
    const samples = samplesWith({ 1: [2] });
    const batch = packBatch(samples, addresses(samples, 1), { sequenceLength: 4, documentMask: false });
    expect([...batch.cuSeqlens]).toEqual([0, 4]);
    expect(batch.targetCount).toBe(4);
  });

  it('does not count rows that only fill up', () => {
    const samples = samplesWith({ 1: [2], 2: [1] });
    const batch = packBatch(samples, addresses(samples, 1, 2, 2), { sequenceLength: 3, documentMask: true }, 1);
    expect([...batch.targets]).toEqual([101, -100, 103, ...new Array(6).fill(-100)]);
    expect(batch.targetCount).toBe(2);
    expect(packBatch(samples, addresses(samples, 1), { sequenceLength: 3, documentMask: false }, 0).targetCount).toBe(
      0,
    );
  });
});
