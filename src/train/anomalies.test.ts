import { describe, expect, it } from 'vitest';
import { SpikeDetector } from './anomalies.js';

const values = Array.from({ length: 60 }, (_, i) => 3 + Math.sin(i) * 0.1);

describe('spike detector', () => {
  it('returns 0 until it has seen enough values', () => {
    const detector = new SpikeDetector();
    for (const value of values.slice(0, 10)) detector.add(value);
    expect(detector.score(1000)).toBe(0);
  });

  it('scores a value in standard deviations above the running mean', () => {
    const detector = new SpikeDetector();
    for (const value of values) detector.add(value);
    expect(Math.abs(detector.score(3))).toBeLessThan(1);
    expect(detector.score(3 + 0.1 * 7)).toBeGreaterThan(6);
    expect(detector.score(1)).toBeLessThan(-6);
  });

  it('gives the same scores after a restore', () => {
    const [whole, first] = [new SpikeDetector(), new SpikeDetector()];
    for (const value of values) whole.add(value);
    for (const value of values.slice(0, 30)) first.add(value);
    const second = new SpikeDetector();
    second.restore(JSON.parse(JSON.stringify(first.state)));
    for (const value of values.slice(30)) second.add(value);
    expect(second.score(5)).toBe(whole.score(5));
  });
});
