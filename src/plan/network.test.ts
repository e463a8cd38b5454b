import { describe, expect, it } from 'vitest';
import fc from '../testing/properties.js';
import { allReduceSeconds, type Network, nodesOf, ringBandwidth, shardSeconds } from './network.js';

/** Round figures: 100 GB/s and 1 µs inside a node of four, 10 GB/s and 5 µs between, 10 µs to begin. */
const NETWORK: Network = {
  perNode: 4,
  nodeBandwidth: 100e9,
  linkBandwidth: 10e9,
  nodeLatency: 1e-6,
  linkLatency: 5e-6,
  startLatency: 10e-6,
};

describe('by hand', () => {
  it('two GPUs of a node: two hops, each with half of the bytes', () => {
    // 10 µs + 2 (1 µs + 0.5 GB / 100 GB/s)
    expect(allReduceSeconds(NETWORK, 2, 1e9)).toBeCloseTo(10.012e-3, 9);
    expect(shardSeconds(NETWORK, 2, 1e9)).toBeCloseTo(5.011e-3, 9);
  });

  it('two nodes: six hops inside, one between, over four links of 10 GB/s', () => {
    expect(ringBandwidth(NETWORK, 8)).toBe(40e9);
    // 10 µs + 2 (6 µs + 5 µs + 7/8 GB / 40 GB/s)
    expect(allReduceSeconds(NETWORK, 8, 1e9)).toBeCloseTo(43.782e-3, 9);
    expect(shardSeconds(NETWORK, 8, 1e9)).toBeCloseTo(21.896e-3, 9);
  });

  it('few bytes over many nodes go by tree: its depth, not the number of ranks', () => {
    // 10 µs + 2 (3 hops inside + 4 levels between) + 2000 bytes / (0.9 * 40 GB/s)
    expect(allReduceSeconds(NETWORK, 64, 1000)).toBeCloseTo(56.0556e-6, 9);
    // A ring would need 2 (48 + 15 * 5) µs; half of one is what sharding has.
    expect(shardSeconds(NETWORK, 64, 1000)).toBeCloseTo(133.0246e-6, 9);
  });

  it('one GPU a node: nothing but links', () => {
    const single = { ...NETWORK, perNode: 1 };
    expect(ringBandwidth(single, 2)).toBe(10e9);
    expect(allReduceSeconds(single, 2, 1e9)).toBeCloseTo(10e-6 + 2 * (5e-6 + 0.05), 9);
  });

  it('links faster than the node change nothing: the node is the slowest', () => {
    expect(ringBandwidth({ ...NETWORK, linkBandwidth: 1e12 }, 8)).toBe(100e9);
  });

  it('a node with fewer ranks than the others narrows the ring', () => {
    expect(nodesOf(NETWORK, 6)).toBe(2);
    expect(ringBandwidth(NETWORK, 6)).toBe(30e9);
  });
});

describe('always', () => {
  const ranks = fc.integer({ min: 0, max: 12 }).map((power) => 2 ** power);
  const bytes = fc.integer({ min: 1, max: 2e9 });
  const network = fc.record({
    perNode: fc.constantFrom(1, 2, 4, 8, 16),
    nodeBandwidth: fc.double({ min: 1e9, max: 1e12, noNaN: true }),
    linkBandwidth: fc.double({ min: 1e8, max: 1e11, noNaN: true }),
    nodeLatency: fc.double({ min: 0, max: 1e-5, noNaN: true }),
    linkLatency: fc.double({ min: 0, max: 1e-4, noNaN: true }),
    startLatency: fc.double({ min: 0, max: 1e-4, noNaN: true }),
  });

  it('one rank sends nothing', () => {
    fc.assert(
      fc.property(network, bytes, (on, size) => {
        expect(allReduceSeconds(on, 1, size)).toBe(0);
        expect(shardSeconds(on, 1, size)).toBe(0);
      }),
    );
  });

  it('more bytes and slower links take longer', () => {
    fc.assert(
      fc.property(network, ranks, bytes, (on, n, size) => {
        expect(allReduceSeconds(on, n, 2 * size)).toBeGreaterThanOrEqual(allReduceSeconds(on, n, size));
        const slower = { ...on, linkBandwidth: on.linkBandwidth / 2, nodeBandwidth: on.nodeBandwidth / 2 };
        expect(allReduceSeconds(slower, n, size)).toBeGreaterThanOrEqual(allReduceSeconds(on, n, size));
      }),
    );
  });

  it('a sum is never faster than the bytes that each rank must send', () => {
    fc.assert(
      fc.property(network, ranks, bytes, (on, n, size) => {
        const least = (2 * ((n - 1) / n) * size) / ringBandwidth(on, n);
        expect(allReduceSeconds(on, n, size)).toBeGreaterThanOrEqual(n === 1 ? 0 : least * (1 - 1e-12));
      }),
    );
  });

  it('a sum is at most two halves of a ring, but for one start', () => {
    fc.assert(
      fc.property(network, ranks, bytes, (on, n, size) => {
        const both = 2 * shardSeconds(on, n, size) - (n === 1 ? 0 : on.startLatency);
        expect(allReduceSeconds(on, n, size)).toBeLessThanOrEqual(both * (1 + 1e-12));
      }),
    );
  });
});
