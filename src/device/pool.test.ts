import { describe, expect, it } from 'vitest';
import fc from '../testing/properties.js';
import type { MemoryBlock } from './device.js';
import { MemoryPool } from './pool.js';

/** An allocator that counts, and throws when it frees what it did not allocate. */
function fakeSystem() {
  const live = new Map<bigint, number>();
  let next = 4096n;
  return {
    live,
    allocate(bytes: number): bigint {
      const address = next;
      next += BigInt(bytes);
      live.set(address, bytes);
      return address;
    },
    free(address: bigint): void {
      if (!live.delete(address)) throw new Error(`${address} is not allocated`);
    },
  };
}

describe('MemoryPool', () => {
  it('returns at least the requested size and wastes at most an eighth beyond the smallest block', () => {
    const pool = new MemoryPool(fakeSystem());
    const sizes = fc.oneof(fc.integer({ min: 0, max: 4096 }), fc.integer({ min: 0, max: 2 ** 40 }));
    fc.assert(
      fc.property(sizes, (bytes) => {
        const block = pool.take(bytes);
        pool.give(block);
        return block.bytes >= bytes && block.bytes % 256 === 0 && block.bytes <= Math.max(256, bytes * 1.125 + 255);
      }),
    );
  });

  it.each([0, 1, 256, 257, 512, 513, 2 ** 20 - 1, 2 ** 20, 2 ** 20 + 1, 2 ** 33 + 1])('holds %i bytes', (bytes) => {
    const block = new MemoryPool(fakeSystem()).take(bytes);
    expect(block.bytes).toBeGreaterThanOrEqual(Math.max(bytes, 1));
  });

  it('reuses a freed block instead of allocating', () => {
    const pool = new MemoryPool(fakeSystem());
    const first = pool.take(1000);
    pool.give(first);
    expect(pool.take(1001)).toBe(first); // similar sizes share blocks
    expect(pool.take(1000)).not.toBe(first);
    expect(pool.systemAllocations).toBe(2);
  });

  it('counts use, reserve and peak', () => {
    const pool = new MemoryPool(fakeSystem());
    const [a, b] = [pool.take(1024), pool.take(2048)];
    expect([pool.bytesInUse, pool.bytesReserved, pool.peakBytesInUse]).toEqual([3072, 3072, 3072]);
    pool.give(a);
    expect([pool.bytesInUse, pool.bytesReserved, pool.peakBytesInUse]).toEqual([2048, 3072, 3072]);
    pool.resetPeak();
    expect(pool.peakBytesInUse).toBe(2048);
    pool.give(b);
    expect([pool.bytesInUse, pool.peakBytesInUse]).toEqual([0, 2048]);
  });

  it('returns unused blocks on trim, and only those', () => {
    const system = fakeSystem();
    const pool = new MemoryPool(system);
    const [kept, unused] = [pool.take(1024), pool.take(4096)];
    pool.give(unused);
    pool.trim();
    expect([...system.live.keys()]).toEqual([kept.address]);
    expect([pool.bytesInUse, pool.bytesReserved]).toEqual([1024, 1024]);
    pool.take(4096);
    expect(pool.systemAllocations).toBe(3);
  });

  it('does not count memory that the system refused', () => {
    let full = true;
    const pool = new MemoryPool({
      allocate: () => {
        if (full) throw new Error('out of memory');
        return 1n;
      },
      free: () => {},
    });
    expect(() => pool.take(1024)).toThrow('out of memory');
    expect([pool.bytesInUse, pool.bytesReserved, pool.systemAllocations]).toEqual([0, 0, 0]);
    full = false;
    pool.take(1024);
    expect(pool.bytesInUse).toBe(1024);
  });

  it('never returns a block that is in use, in any order of calls', () => {
    const call = fc.oneof(
      fc.record({ take: fc.integer({ min: 0, max: 100_000 }) }),
      fc.record({ give: fc.nat() }),
      fc.constant('trim' as const),
    );
    fc.assert(
      fc.property(fc.array(call, { maxLength: 200 }), (calls) => {
        const system = fakeSystem();
        const pool = new MemoryPool(system);
        const held: MemoryBlock[] = [];
        for (const step of calls) {
          if (step === 'trim') pool.trim();
          else if ('take' in step) held.push(pool.take(step.take));
          else if (held.length > 0) pool.give(held.splice(step.give % held.length, 1)[0]);
          const total = held.reduce((sum, { bytes }) => sum + bytes, 0);
          const reserved = [...system.live.values()].reduce((sum, bytes) => sum + bytes, 0);
          if (new Set(held.map(({ address }) => address)).size !== held.length) return false;
          if (pool.bytesInUse !== total || pool.bytesReserved !== reserved) return false;
        }
        return true;
      }),
    );
  });
});
