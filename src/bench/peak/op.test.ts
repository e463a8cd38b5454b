import { spawn } from 'node:child_process';
import { availableParallelism } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';
import { describe, expect, it } from 'vitest';
import { cpu } from '../../testing/devices.js';
import { measurePeak, measureRead } from './op.js';

describe('measured peak', () => {
  it('is a plausible number of operations per second', () => {
    const peak = measurePeak(cpu(), 4);
    expect(peak).toBeGreaterThan(1e9);
    expect(peak).toBeLessThan(1e14);
  });

  it('is a plausible number of bytes per second', () => {
    const rate = measureRead(cpu(), 2);
    expect(rate).toBeGreaterThan(1e8);
    expect(rate).toBeLessThan(1e13);
  });

  it('grows with the number of threads, on a busy machine too: it refers to processor time', async () => {
    const device = cpu();
    const { threads } = device;
    // More programs than processors: each thread of the measurement gets a third of one at best.
    const busy = Array.from({ length: 2 * availableParallelism() }, () =>
      spawn(process.execPath, ['-e', 'for (;;);'], { stdio: 'ignore' }),
    );
    try {
      await sleep(300);
      const ratio = () => {
        device.threads = 1;
        const one = measurePeak(device);
        device.threads = 2;
        return measurePeak(device) / one;
      };
      // A burst of either may have bad luck on a busy machine; a peak by the clock would stay near 1 every time.
      const ratios: number[] = [];
      while (ratios.length < 5 && !ratios.some((value) => value > 1.4 && value < 2.8)) ratios.push(ratio());
      expect(ratios.at(-1), ratios.join(' ')).toBeGreaterThan(1.4);
      expect(ratios.at(-1), ratios.join(' ')).toBeLessThan(2.8);
    } finally {
      device.threads = threads;
      for (const program of busy) program.kill('SIGKILL');
    }
  });
});
