/** The kernels of CUDA on the thread emulator, which takes seconds. */
import { describe, expect, it } from 'vitest';
import { AWKWARD } from '../../../testing/attention.js';
import { EmulatedCuda } from '../../../testing/emulated-cuda.js';
import { relativeError } from '../../../testing/numbers.js';
import { compareScorerLoss } from './testing/compare.js';

describe('scorer loss on the thread emulator of CUDA', () => {
  // Few blocks: every emulated thread costs time, also one without work.
  const cuda = new EmulatedCuda({ multiprocessors: 1 });
  const names = ['no multiple of l_sel', '6 heads a group, two groups', 'no overlap, d = l', 'blocks of 12', 'ragged'];
  const some = [...names, 'dk 130, dv 67', 'empty batch'].map((name) => AWKWARD.find((one) => one.name === name)!);
  // Six slots: up to three blocks are chosen by score.
  const choosing = some.map((one) => ({ ...one, sparse: { ...one.sparse, nSel: 6 } }));

  it.each(choosing)('equals the reference, loss and gradients: $name', (example) => {
    const { loss, added, pairs, expected } = compareScorerLoss(example, 1e4, 'v2', { device: cuda });
    expect(pairs).toBe(expected.pairs);
    expect(pairs > 0).toBe(example.lengths.length > 0);
    expect(Math.abs(loss - expected.loss)).toBeLessThanOrEqual(2e-5 * expected.loss);
    expect(added[2].every((value) => value === 0)).toBe(true);
    const wanted = [expected.dq, expected.dkCmp].map((values) => values.map((value) => 1e4 * value));
    if (pairs === 0) expect(added.every((values) => values.every((value) => value === 0))).toBe(true);
    else for (const i of [0, 1]) expect(relativeError(added[i], wanted[i])).toBeLessThan(2e-5);
  });
});
