import { createHash } from 'node:crypto';
import { expect, it } from 'vitest';
import { sha256 } from './sha256.js';

it.each([0, 1, 3, 55, 56, 63, 64, 65, 119, 120, 1000, 20_000])('equals that of Node for %i characters', (length) => {
  const text = Array.from({ length }, (_, i) => String.fromCodePoint(32 + ((i * 7919) % 900))).join('');
  expect(sha256(text)).toBe(createHash('sha256').update(text).digest('hex'));
});
