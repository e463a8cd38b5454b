import { describe, expect, it } from 'vitest';
import { dot, finiteDifferences, randomValues, relativeError } from '../../../testing/numbers.js';
import { type Branches, combineBackward, combineForward } from './reference.js';

describe('combine reference', () => {
  it('weighs the branches head by head', () => {
    const branches: Branches<Float64Array> = [
      Float64Array.of(1, 2, 3, 4),
      Float64Array.of(10, 20, 30, 40),
      Float64Array.of(100, 200, 300, 400),
    ];
    expect([...combineForward(Float64Array.of(1, 2, 3, 0, 0.5, 0), branches)]).toEqual([321, 642, 15, 20]);
  });

  it('has gradients equal to finite differences', () => {
    const gates = randomValues(2 * 3 * 3, 1);
    const branches: Branches<Float64Array> = [randomValues(24, 2), randomValues(24, 3), randomValues(24, 4)];
    const dOut = randomValues(24, 5);
    const { dGates, dBranches } = combineBackward(gates, branches, dOut);
    const value = () => dot(combineForward(gates, branches), dOut);
    expect(relativeError(dGates, finiteDifferences(value, gates))).toBeLessThan(1e-8);
    for (const b of [0, 1, 2])
      expect(relativeError(dBranches[b], finiteDifferences(value, branches[b]))).toBeLessThan(1e-8);
  });
});
