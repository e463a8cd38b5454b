import { expect, test } from 'vitest';
import fc from '../../testing/properties.js';
import { formatFloat32 } from './csv.js';

test('short where short is enough', () => {
  expect(formatFloat32(Math.fround(0.1))).toBe('0.1');
  expect(formatFloat32(5.4321)).toBe('5.4321');
  expect(formatFloat32(3e-4)).toBe('0.0003');
  expect(formatFloat32(0)).toBe('0');
  expect(formatFloat32(16777216)).toBe('16777216');
  expect(formatFloat32(1e-8)).toBe('1e-8');
});

test('what is not finite is named so that Number and Python read it', () => {
  expect([Number.NaN, Infinity, -Infinity].map(formatFloat32)).toEqual(['NaN', 'Infinity', '-Infinity']);
  expect(formatFloat32(1e300)).toBe('Infinity');
});

test('every float32 reads back bit for bit, with at most nine digits', () => {
  const check = (bits: number): void => {
    const value = new Float32Array(new Uint32Array([bits]).buffer)[0];
    if (!Number.isFinite(value)) return;
    const text = formatFloat32(value);
    if (Math.fround(Number(text)) !== value) throw new Error(`${bits}: ${text} is not ${value}`);
    const digits = text.replace(/e.*$/, '').replace(/[-.]/g, '').replace(/^0+/, '').replace(/0+$/, '');
    if (digits.length > 9) throw new Error(`${bits}: ${text} is too long`);
  };
  for (const bits of [0, 1, 0x007fffff, 0x00800000, 0x7f7fffff, 0x3f7fffff, 0x3f800001]) check(bits);
  fc.assert(fc.property(fc.integer({ min: 0, max: 0xffffffff }), check), { numRuns: 20_000 });
});
