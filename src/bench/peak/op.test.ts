import { describe, expect, it } from 'vitest';
import { cpu } from '../../testing/devices.js';
import { measurePeak } from './op.js';

describe('measured peak', () => {
  it('is a plausible number of operations per second', () => {
    const peak = measurePeak(cpu(), 4);
    expect(peak).toBeGreaterThan(1e9);
    expect(peak).toBeLessThan(1e14);
  });

  it('is not smaller with all threads than with one', () => {
    const device = cpu();
    const { threads } = device;
    device.threads = 1;
    const one = measurePeak(device, 6);
    device.threads = threads;
    // The best of as many runs as it takes: on a busy machine all threads seldom have their processors at the same time.
    const end = performance.now() + 300_000;
    let all = 0;
    while (all <= one * 0.7 && performance.now() < end) all = Math.max(all, measurePeak(device, 6));
    expect(all).toBeGreaterThan(one * 0.7);
  });
});
