import { describe, expect, it } from 'vitest';
import { cpu } from '../testing/devices.js';
import { type LongCase, longChecks, sampled } from './long.js';
import { type Fault, FaultyDevice, replaced, spoiled } from './testing/faulty-device.js';

// As long as a test may be: the real ones are run by `verify --full`.
const EXAMPLE: LongCase = {
  name: 'example',
  length: 1500,
  heads: { heads: 6, groups: 2, dk: 16, dv: 12 },
  sparse: { l: 16, d: 8, lSel: 32, nSel: 6, w: 96 },
};

function finding(faults: Record<string, Fault> = {}) {
  const found = sampled(new FaultyDevice(cpu(), faults), EXAMPLE);
  if ('skipped' in found) throw new Error(found.skipped);
  return found;
}

describe('a sample of rows of a long sequence', () => {
  it('equals the reference', () => {
    expect(finding().error).toBeLessThan(2e-5);
    expect(cpu().pool.bytesInUse).toBe(0);
  });

  it('shows a wrong output row', () => {
    const lastRow = 1499 * 6 * 12;
    expect(finding({ combine_forward: spoiled(4, lastRow, (value) => value + 1) })).toMatchObject({
      detail: 'out is off at token 1499',
    });
  });

  it('shows keys that were left out of a gradient', () => {
    const found = finding({ selected_backward: replaced(2, (block) => block - 1) });
    expect(found.error).toBeGreaterThan(1e-3);
  });

  it('shows a gradient where there should be none', () => {
    const beside = 1 * 6 * 16; // token 1 is a sampled row, token 2 is not
    const found = finding({ compressed_backward: spoiled('dq', beside + 6 * 16, () => 1e-3) });
    expect(found).toMatchObject({ error: 1, detail: 'dq is not zero at token 2, whose output got no gradient' });
  });

  it('is skipped with a reason where memory is short', () => {
    const huge = { ...EXAMPLE, heads: { ...EXAMPLE.heads, dk: 2 ** 26 } };
    expect(sampled(cpu(), huge)).toEqual({ skipped: expect.stringMatching(/^needs \d+\.\d GiB of free memory$/) });
  });

  it('includes a case whose offsets need more than 32 bits', () => {
    expect(longChecks(cpu()).map((check) => check.case)).toContainEqual(expect.stringContaining('2^31 bytes'));
  });
});
