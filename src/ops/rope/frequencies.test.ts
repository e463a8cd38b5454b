import { describe, expect, it } from 'vitest';
import { type RotaryScaling, rotaryAngles } from './frequencies.js';

const LLAMA3: RotaryScaling = {
  type: 'llama3',
  factor: 8,
  originalContext: 8192,
  lowFreqFactor: 1,
  highFreqFactor: 4,
};
const YARN: RotaryScaling = {
  type: 'yarn',
  factor: 4,
  originalContext: 32_768,
  betaFast: 32,
  betaSlow: 1,
  attentionFactor: null,
};
const of = (scaling: RotaryScaling, size = 128, theta = 500_000) => rotaryAngles({ size, theta, scaling });
const plain = (size = 128, theta = 500_000) => rotaryAngles({ size, theta }).frequencies;

describe('rotary frequencies', () => {
  it('are powers of theta', () => {
    const { frequencies, scale, amplitude } = rotaryAngles({ size: 6, theta: 1000 });
    expect(Array.from(frequencies)).toEqual([1, 1000 ** (-1 / 3), 1000 ** (-2 / 3)]);
    expect([scale, amplitude]).toEqual([1, 1]);
    expect(rotaryAngles({ size: 6, theta: 1000, scale: 2.5 }).scale).toBe(2.5);
  });

  it('are all divided with linear', () => {
    const { frequencies } = of({ type: 'linear', factor: 3 });
    expect(Array.from(frequencies)).toEqual(Array.from(plain(), (frequency) => frequency / 3));
  });

  it('are divided by wavelength with llama3', () => {
    const { frequencies, amplitude } = of(LLAMA3);
    expect(amplitude).toBe(1);
    const kinds = { kept: 0, blended: 0, divided: 0 };
    frequencies.forEach((frequency, j) => {
      const wave = (2 * Math.PI) / plain()[j];
      if (wave < 8192 / 4) {
        kinds.kept += 1;
        expect(frequency).toBe(plain()[j]);
      } else if (wave > 8192) {
        kinds.divided += 1;
        expect(frequency).toBe(plain()[j] / 8);
      } else {
        kinds.blended += 1;
        const smooth = (8192 / wave - 1) / (4 - 1);
        expect(frequency / (((1 - smooth) * plain()[j]) / 8 + smooth * plain()[j])).toBeCloseTo(1, 12);
      }
    });
    expect(Math.min(...Object.values(kinds))).toBeGreaterThan(3);
  });

  it('are divided along a ramp with yarn', () => {
    const { frequencies, amplitude } = of(YARN, 128, 1_000_000);
    expect(amplitude).toBeCloseTo(0.1 * Math.log(4) + 1, 15);
    const base = plain(128, 1_000_000);
    // Pair j turns 32768 * frequency / 2 pi times: 32 times at j = 23.6, once at j = 39.7.
    for (let j = 0; j <= 23; j++) expect(frequencies[j]).toBe(base[j]);
    for (let j = 24; j < 40; j++) {
      const share = (j - 23) / (40 - 23);
      expect(frequencies[j] / ((share * base[j]) / 4 + (1 - share) * base[j])).toBeCloseTo(1, 12);
    }
    for (let j = 40; j < 64; j++) expect(frequencies[j]).toBe(base[j] / 4);
  });

  it('have the amplitude that is given with yarn, and 1 without a factor', () => {
    expect(of({ ...YARN, attentionFactor: 1.5 }).amplitude).toBe(1.5);
    expect(of({ ...YARN, factor: 1 }).amplitude).toBe(1);
  });

  it('name what is not allowed', () => {
    expect(() => rotaryAngles({ size: 3, theta: 10 })).toThrow('a rotated head must have an even size, not 3');
    expect(() => rotaryAngles({ size: 4, theta: 0 })).toThrow('theta must be above 0, not 0');
    expect(() => rotaryAngles({ size: 4, theta: 10, scale: -1 })).toThrow('scale must be above 0, not -1');
    expect(() => of({ type: 'linear', factor: Number.NaN })).toThrow('linear factor must be above 0, not NaN');
    expect(() => of({ ...LLAMA3, highFreqFactor: 1 })).toThrow('llama3 lowFreqFactor 1 must be below highFreqFactor 1');
  });
});
