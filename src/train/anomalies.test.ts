import { describe, expect, it } from 'vitest';
import { addValue, zScore } from './anomalies.js';

const values = Array.from({ length: 60 }, (_, i) => 3 + Math.sin(i) * 0.1);

/** Statistics of some values. */
function statisticsOf(given: readonly number[], statistics = { count: 0, mean: 0, variance: 0 }) {
  for (const value of given) addValue(statistics, value);
  return statistics;
}

describe('spike detection', () => {
  it('scores 0 until it has seen enough values', () => {
    expect(zScore(statisticsOf(values.slice(0, 10)), 1000)).toBe(0);
  });

  it('scores a value in standard deviations above the running mean', () => {
    const statistics = statisticsOf(values);
    expect(Math.abs(zScore(statistics, 3))).toBeLessThan(1);
    expect(zScore(statistics, 3 + 0.1 * 7)).toBeGreaterThan(6);
    expect(zScore(statistics, 1)).toBeLessThan(-6);
  });

  it('gives the same scores after a restore', () => {
    const whole = statisticsOf(values);
    const first = statisticsOf(values.slice(0, 30));
    const second = statisticsOf(values.slice(30), JSON.parse(JSON.stringify(first)));
    expect(zScore(second, 5)).toBe(zScore(whole, 5));
  });
});
