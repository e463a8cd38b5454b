import { describe, expect, it } from 'vitest';
import { shippedConfigs } from './files.js';
import { pickConfigByGpuMemory } from './pick.js';

describe('pickConfigByGpuMemory', () => {
  // What drivers report for cards sold as 16, 24, 32, 40, 48, 80, 96 and 141 GB.
  it.each([
    [15.7, 'm7c_125m_24g'],
    [23.6, 'm7c_125m_24g'],
    [31.8, 'm7c_125m_24g'],
    [39.4, 'm7c_125m_40g'],
    [47.5, 'm7c_125m_40g'],
    [79.1, 'm7c_125m_80g'],
    [94.9, 'm7c_125m_80g'],
    [139.8, 'm7c_125m_80g'],
    [null, 'quickstart'],
  ])('%s GiB: %s', (gib, name) => {
    expect(pickConfigByGpuMemory(gib)).toBe(name);
    expect(shippedConfigs()).toContain(name);
  });

  it.each([Number.NaN, -1])('refuses %s', (gib) => expect(() => pickConfigByGpuMemory(gib)).toThrow(RangeError));
});
