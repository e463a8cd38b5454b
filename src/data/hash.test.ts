import { describe, expect, it } from 'vitest';
import fc from '../testing/properties.js';
import { absorb, mix32 } from './hash.js';

describe('mix32', () => {
  it('gives the published values of the murmur3 finaliser', () => {
    expect([0, 1, 0xffffffff].map(mix32)).toEqual([0, 0x514e28b7, 0x81f16f39]);
  });

  it('changes about half of the output bits for one changed input bit', () => {
    let changed = 0;
    for (let value = 0; value < 1000; value++) {
      for (let bit = 0; bit < 32; bit++) {
        let difference = mix32(value) ^ mix32(value ^ (1 << bit));
        for (; difference !== 0; difference &= difference - 1) changed++;
      }
    }
    expect(changed / 32000).toBeGreaterThan(15.5);
    expect(changed / 32000).toBeLessThan(16.5);
  });
});

describe('absorb', () => {
  it('is a 32-bit unsigned integer that depends on all 53 bits of the value', () => {
    fc.assert(
      fc.property(fc.nat(), fc.maxSafeNat(), fc.integer({ min: 0, max: 51 }), (state, value, bit) => {
        const other = Math.floor(value / 2 ** bit) % 2 === 0 ? value + 2 ** bit : value - 2 ** bit;
        const hash = absorb(state, value);
        expect(hash).toBe(hash >>> 0);
        expect(absorb(state, other)).not.toBe(hash);
      }),
    );
  });

  it('depends on the order and does not rest at zero', () => {
    expect(absorb(absorb(0, 1), 2)).not.toBe(absorb(absorb(0, 2), 1));
    expect(absorb(0, 0)).not.toBe(0);
  });
});
