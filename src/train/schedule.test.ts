import { describe, expect, it } from 'vitest';
import { learningRate } from './trainer.js';

const base = {
  steps: 100,
  lr: 1,
  lr_min_ratio: 0.1,
  lr_schedule: 'cosine',
  warmup_steps: 10,
  wsd_decay_fraction: 0.2,
} as const;

describe('learning rate', () => {
  it('warms up linearly to the peak at the last warm-up step', () => {
    expect(learningRate(1, base)).toBeCloseTo(0.1);
    expect(learningRate(10, base)).toBe(1);
  });

  it.each(['cosine', 'linear', 'wsd'] as const)(
    '%s falls to the floor at exactly the last step, never below',
    (lr_schedule) => {
      const rates = Array.from({ length: 100 }, (_, i) => learningRate(i + 1, { ...base, lr_schedule }));
      expect(rates[99]).toBeCloseTo(0.1);
      expect(rates[98]).toBeGreaterThan(0.1);
      expect(Math.min(...rates.slice(10))).toBeCloseTo(0.1);
      for (let i = 10; i < 100; i++) expect(rates[i]).toBeLessThanOrEqual(rates[i - 1]);
    },
  );

  it('wsd stays at the peak until the decay', () => {
    expect(learningRate(82, { ...base, lr_schedule: 'wsd' })).toBeCloseTo(1, 12);
    expect(learningRate(91, { ...base, lr_schedule: 'wsd' })).toBeCloseTo(0.55);
  });

  it('constant stays', () => {
    expect(learningRate(100, { ...base, lr_schedule: 'constant' })).toBe(1);
  });

  it('cosine passes the middle half-way', () => {
    expect(learningRate(55, base)).toBeCloseTo(0.55);
  });

  it('never lets a long warm-up take more than half of a short run', () => {
    const short = { ...base, steps: 20, warmup_steps: 2000 };
    expect(learningRate(10, short)).toBe(1);
    expect(learningRate(20, short)).toBeCloseTo(0.1);
    expect(learningRate(1, { ...base, steps: 1 })).toBeCloseTo(0.1);
  });
});
