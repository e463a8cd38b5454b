import { expect, it } from 'vitest';
import { LiveLine } from './live-line.js';

const shownOn = (columns: number | undefined, text: string): string => {
  let written = '';
  const stream = { write: (part: string) => (written += part), isTTY: true, ...(columns !== undefined && { columns }) };
  new LiveLine(stream).show(text);
  return written.replace('\r\x1b[K', '');
};

it('keeps a line within the terminal', () => expect(shownOn(10, 'step 12 of 400')).toBe('step 12 o'));

it('shows the whole line where the terminal does not know its width (0 in some containers)', () => {
  expect(shownOn(0, 'step 12 of 400')).toBe('step 12 of 400');
  expect(shownOn(undefined, 'step 12 of 400')).toBe('step 12 of 400');
});
