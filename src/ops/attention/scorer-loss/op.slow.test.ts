import { describe, expect, it } from 'vitest';
import { CpuDevice } from '../../../device/cpu/cpu.js';
import { Tape } from '../../../tensor/tape.js';
import { type AttentionCase, AWKWARD, randomInputs, upload } from '../../../testing/attention.js';
import { devices } from '../../../testing/devices.js';
import { relativeError } from '../../../testing/numbers.js';
import { Sequences } from '../../common/sequences.js';
import { nativeSparseAttention, type SparseInputs } from '../nsa.js';
import { compareScorerLoss } from './testing/compare.js';

const LONG: AttentionCase = {
  name: 'long enough for several key chunks',
  lengths: [2600, 900],
  heads: { heads: 6, groups: 2, dk: 24, dv: 24 },
  sparse: { l: 8, d: 4, lSel: 16, nSel: 9, w: 24 },
};
const CASES = [...AWKWARD.filter(({ sparse }) => sparse.scorePool !== 'max'), LONG];

// The tolerance is that of fp32.
describe.each(devices().filter(({ dtype }) => dtype === 'f32'))('scorer loss on $name', ({ device: open }) => {
  it.each(CASES)('equals the reference, loss and gradients: $name', (example) => {
    // So large a weight that the branch's own gradient costs the difference no digits.
    const { loss, added, pairs, expected } = compareScorerLoss(example, 1e4, 'v2', { device: open() });
    expect(pairs).toBe(expected.pairs);
    expect(Math.abs(loss - expected.loss)).toBeLessThanOrEqual(2e-5 * expected.loss);
    expect(added[2].every((value) => value === 0)).toBe(true);
    const wanted = [expected.dq, expected.dkCmp].map((values) => values.map((value) => 1e4 * value));
    if (pairs === 0) expect(added.every((values) => values.every((value) => value === 0))).toBe(true);
    else for (const i of [0, 1]) expect(relativeError(added[i], wanted[i])).toBeLessThan(2e-5);
  });

  it.each(['v1', 'reference'] as const)('takes the masses of kernel %s', (kernel) => {
    const choosing = { ...AWKWARD[9], sparse: { ...AWKWARD[9].sparse, nSel: 7 } };
    const [found, v2] = [kernel, 'v2' as const].map((name) => compareScorerLoss(choosing, 1, name, { device: open() }));
    expect(v2.loss).toBeGreaterThan(0);
    expect(Math.abs(found.loss - v2.loss)).toBeLessThan(1e-5 * v2.loss);
  });

  it('refuses scores by the largest', () => {
    const largest = AWKWARD.find(({ sparse }) => sparse.scorePool === 'max')!;
    expect(() => compareScorerLoss(largest, 1, 'v2', { device: open() })).toThrow(
      'train.scorer_loss adds the scores of a block: it needs nsa.score_pool sum, not max',
    );
  });
});

it('needs memory that grows no faster than the number of tokens', () => {
  const bytes = (length: number, scorerWeight: number) => {
    const device = new CpuDevice({ threads: 1 });
    const example = { ...LONG, lengths: [length] };
    const names = ['q', 'kCmp', 'vCmp', 'kSel', 'vSel', 'kWin', 'vWin', 'gates'] as const;
    const given = randomInputs(example, 1);
    using tokens = new Sequences(device, example.lengths);
    using tape = new Tape(device);
    const tensors = names.map((name) => [name, tape.watch(tape.own(upload(device, given[name])))]);
    const inputs = Object.fromEntries(tensors) as unknown as SparseInputs;
    const { out } = nativeSparseAttention(tape, inputs, tokens, example.sparse, { scorerWeight });
    tape.backward(out, given.dOut.values);
    return device.pool.peakBytesInUse + device.scratchBytes;
  };
  const added = [500, 1000, 2000].map((length) => bytes(length, 0.1) - bytes(length, 0));
  expect(added[1]).toBeGreaterThan(0);
  expect(added[2] - added[1]).toBeLessThan(2.2 * (added[1] - added[0]));
});
