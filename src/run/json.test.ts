import { expect, test } from 'vitest';
import { asNumber, toJson } from './json.js';

test('numbers that JSON lacks keep their names', () => {
  const text = toJson({ loss: Number.NaN, nested: [Infinity, -Infinity, 1.5] });
  expect(text).toBe('{"loss":"NaN","nested":["Infinity","-Infinity",1.5]}');
  const parsed = JSON.parse(text) as { loss: unknown; nested: unknown[] };
  expect(asNumber(parsed.loss)).toBeNaN();
  expect(parsed.nested.map(asNumber)).toEqual([Infinity, -Infinity, 1.5]);
});

test('other things are no numbers', () => {
  for (const value of ['1', '', null, undefined, true, {}, []]) expect(asNumber(value)).toBeUndefined();
});
