import { describe, expect, it } from 'vitest';
import { UsageError } from '../../errors.js';
import { type HeadShape, type SparseShape, validateShapes } from './shape.js';

const HEADS: HeadShape = { heads: 12, groups: 2, dk: 64, dv: 64 };
const SPARSE: SparseShape = { l: 32, d: 16, lSel: 64, nSel: 16, w: 512 };

describe('attention shapes', () => {
  it.each<[Partial<HeadShape>, Partial<SparseShape>]>([
    [{}, {}],
    [{ heads: 1, groups: 1 }, {}],
    [
      { heads: 16, groups: 1, dv: 3 },
      { l: 1, d: 1, lSel: 1, nSel: 3, w: 1 },
    ],
    [
      { heads: 4, groups: 4 },
      { l: 64, d: 64 },
    ],
  ])('allow %o %o', (heads, sparse) => {
    expect(() => validateShapes({ ...HEADS, ...heads }, { ...SPARSE, ...sparse })).not.toThrow();
  });

  it.each<[string, Partial<HeadShape>, Partial<SparseShape>]>([
    ['groups must divide heads: 5 does not divide 12', { groups: 5 }, {}],
    ['groups must leave at most 32 heads in a group, not 33', { heads: 66 }, {}],
    ['groups must divide heads: 24 does not divide 12', { groups: 24 }, {}],
    ['heads must be a whole number from 1, not 0', { heads: 0 }, {}],
    ['groups must be a whole number from 1, not -1', { groups: -1 }, {}],
    ['dk must be a whole number from 1, not 1.5', { dk: 1.5 }, {}],
    ['dv must be a whole number from 1, not NaN', { dv: Number.NaN }, {}],
    ['l must be a whole number from 1, not 0', {}, { l: 0 }],
    ['d must be a whole number from 1, not 0', {}, { d: 0 }],
    ['d must divide l: 12 does not divide 32', {}, { d: 12 }],
    ['d must divide l_sel: 16 does not divide 72', {}, { lSel: 72 }],
    ['l must be at most l_sel: 128 is greater than 64', {}, { l: 128 }],
    ['n_sel must be a whole number from 3, not 2', {}, { nSel: 2 }],
    ['w must be a whole number from 1, not 0', {}, { w: 0 }],
  ])('refuse: %s', (message, heads, sparse) => {
    const validate = () => validateShapes({ ...HEADS, ...heads }, { ...SPARSE, ...sparse });
    expect(validate).toThrow(UsageError);
    expect(validate).toThrow(message);
  });
});
