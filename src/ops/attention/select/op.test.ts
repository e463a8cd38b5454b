import { describe, expect, it } from 'vitest';
import { Tape } from '../../../tensor/tape.js';
import { type AttentionCase, AWKWARD, type Input, randomInputs, starts, upload } from '../../../testing/attention.js';
import { devices } from '../../../testing/devices.js';
import fc from '../../../testing/properties.js';
import { differentSelections } from '../../../testing/selection.js';
import { Sequences } from '../../common/sequences.js';
import { compressedAttention } from '../compressed/op.js';
import { selectBlocks } from './op.js';
import { importance, selectBlocks as selectReference } from './reference.js';

describe.each(devices())('select on $name', ({ device, dtype }) => {
  const select = (example: AttentionCase, q: Input, kCmp: Input, vCmp: Input): Int32Array => {
    const tape = new Tape(device(), { record: false });
    const sequences = new Sequences(device(), example.lengths);
    const [tq, tk, tv] = [q, kCmp, vCmp].map((input) => tape.own(upload(device(), input)));
    const { lse } = compressedAttention(tape, { q: tq, k: tk, v: tv }, sequences, example.sparse);
    const selected = selectBlocks(tape, { q: tq, k: tk, lse }, sequences, example.sparse).read() as Int32Array;
    tape.end();
    sequences.free();
    return selected;
  };

  const check = (example: AttentionCase, seed: number) => {
    const { q, kCmp, vCmp } = randomInputs(example, seed, dtype);
    const cmpStarts = starts(
      example.lengths.map((length) =>
        length < example.sparse.l ? 0 : Math.floor((length - example.sparse.l) / example.sparse.d) + 1,
      ),
    );
    const offsets = starts(example.lengths);
    const expected = selectReference(q.values, kCmp.values, offsets, cmpStarts, example.heads, example.sparse);
    const scores = importance(q.values, kCmp.values, offsets, cmpStarts, example.heads, example.sparse);
    expect(differentSelections(select(example, q, kCmp, vCmp), expected, example, scores)).toEqual([]);
  };

  it.each(AWKWARD)('equals the reference: $name', (example) => check(example, 1));

  it('equals the reference for random shapes', () => {
    const shape = fc.record({
      length: fc.integer({ min: 0, max: 260 }),
      groups: fc.integer({ min: 1, max: 2 }),
      perGroup: fc.integer({ min: 1, max: 7 }),
      dk: fc.constantFrom(2, 8, 20),
      d: fc.integer({ min: 1, max: 5 }),
      perBlock: fc.integer({ min: 1, max: 4 }),
      perSelection: fc.integer({ min: 0, max: 3 }),
      initBlocks: fc.integer({ min: 0, max: 3 }),
      localBlocks: fc.integer({ min: 1, max: 3 }),
      free: fc.integer({ min: 0, max: 5 }),
    });
    fc.assert(
      fc.property(shape, fc.nat(1000), (s, seed) => {
        const l = s.d * s.perBlock;
        check(
          {
            name: 'random',
            lengths: [s.length, 5],
            heads: { heads: s.groups * s.perGroup, groups: s.groups, dk: s.dk, dv: 4 },
            sparse: {
              l,
              d: s.d,
              lSel: l + s.d * s.perSelection,
              w: 4,
              initBlocks: s.initBlocks,
              localBlocks: s.localBlocks,
              nSel: s.initBlocks + s.localBlocks + s.free,
            },
          },
          seed,
        );
      }),
      { numRuns: 40, seed: 7 },
    );
  });

  it('gives equal scores to the lower index', () => {
    const example = { ...AWKWARD[0], lengths: [200] };
    const { q, kCmp, vCmp } = randomInputs(example, 1, dtype);
    kCmp.values.fill(0.5); // every block looks the same
    const selected = select(example, q, kCmp, vCmp);
    expect(Array.from(selected.slice(-4))).toEqual([0, 1, 11, 12]);
  });

  it('always fills its slots with different, visible, ascending blocks, even when scores are NaN', () => {
    const example = { ...AWKWARD[0], lengths: [300] };
    const { q, kCmp, vCmp } = randomInputs(example, 1, dtype);
    q.values.fill(Number.NaN, q.values.length / 2);
    const selected = select(example, q, kCmp, vCmp);
    for (let t = 0; t < 300; t++) {
      const row = Array.from(selected.slice(t * 4, t * 4 + 4));
      const blocks = Math.floor(t / 16) + 1;
      expect(row.filter((block) => block >= 0)).toHaveLength(Math.min(4, blocks));
      expect(new Set(row.filter((block) => block >= 0)).size).toBe(Math.min(4, blocks));
      expect(Math.max(...row)).toBe(blocks - 1);
    }
  });

  it('refuses sizes by name', () => {
    const tape = new Tape(device());
    const sequences = new Sequences(device(), [64]);
    const inputs = {
      q: tape.zeros([64, 2, 8]),
      k: tape.zeros([sequences.compressed({ l: 8, d: 3 }).total, 1, 8]),
      lse: tape.zeros([64, 2]),
    };
    expect(() => selectBlocks(tape, inputs, sequences, { l: 8, d: 3, lSel: 16, nSel: 4, w: 8 })).toThrow(
      'd must divide l',
    );
    tape.end();
  });
});
