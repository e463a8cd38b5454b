import { expect, it } from 'vitest';
import { sourceConstants } from './source-constants.js';

const source = new URL('../../../ops/attention/fused/plan.cuh', import.meta.url);

it('reads macros and constants', () => {
  expect(sourceConstants(source, ['LAG', 'MAX_STRETCHES'])).toEqual({ LAG: 2, MAX_STRETCHES: 128 });
});

it.each(['RING', 'UNION_TOKENS', 'NOTHING', 'MAX'])('refuses %s, which is not a number there', (name) => {
  expect(() => sourceConstants(source, [name])).toThrow(`does not define ${name} as a number`);
});
