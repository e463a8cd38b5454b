import { expect, it } from 'vitest';
import fc from '../../testing/properties.js';
import { StopFilter } from './sequence.js';

function filtered(pieces: readonly string[], stops: readonly string[]): { text: string; stopped: boolean } {
  const filter = new StopFilter(stops);
  let text = '';
  for (const piece of pieces) {
    const result = filter.push(piece);
    text += result.text;
    if (result.stopped) return { text, stopped: true };
  }
  return { text: text + filter.end(), stopped: false };
}

const few = (least: number, most: number) =>
  fc.array(fc.constantFrom('a', 'b', 'c'), { minLength: least, maxLength: most }).map((letters) => letters.join(''));

it('gives the same text however it is cut, and ends before the first stop that is complete', () => {
  fc.assert(
    fc.property(fc.array(few(0, 5), { maxLength: 12 }), fc.array(few(1, 4), { maxLength: 3 }), (pieces, stops) => {
      const whole = pieces.join('');
      const ends = Array.from({ length: whole.length + 1 }, (_, end) => end);
      const end = ends.find((at) => stops.some((stop) => whole.slice(0, at).endsWith(stop)));
      const longest = Math.max(
        ...stops.filter((stop) => whole.slice(0, end).endsWith(stop)).map(({ length }) => length),
      );
      const expected =
        end === undefined ? { text: whole, stopped: false } : { text: whole.slice(0, end - longest), stopped: true };
      expect(filtered(pieces, stops)).toEqual(expected);
      expect(filtered([...whole], stops)).toEqual(expected);
    }),
    { numRuns: 500 },
  );
});

it('holds back only what may become a stop', () => {
  const filter = new StopFilter(['\n\n', 'END']);
  expect(filter.push('one\n')).toEqual({ text: 'one', stopped: false });
  expect(filter.push('two E')).toEqual({ text: '\ntwo ', stopped: false });
  expect(filter.push('N')).toEqual({ text: '', stopped: false });
  expect(filter.push('T')).toEqual({ text: 'ENT', stopped: false });
  expect(filter.push('\n\nmore')).toEqual({ text: '', stopped: true });
});

it('without stops passes everything on at once', () => {
  expect(new StopFilter([]).push('text')).toEqual({ text: 'text', stopped: false });
});

it('finds 256 long stops in hostile text within microseconds per character', () => {
  const stops = Array.from({ length: 256 }, (_, i) => `${'a'.repeat(63 - (i % 8))}${i}`);
  const startedAt = process.cpuUsage();
  const filter = new StopFilter([...stops, 'a'.repeat(8000)]);
  for (let i = 0; i < 200; i++) expect(filter.push(`${'a'.repeat(39)}b`).stopped).toBe(false);
  const { user, system } = process.cpuUsage(startedAt);
  expect((user + system) / 8000).toBeLessThan(200); // 4 on an idle machine
});
