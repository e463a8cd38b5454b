/** The words of a text, by GPT-2's pattern, in a counter. */

import { wordEnd } from '../gpt2-words.js';
import type { WordCounter } from './word-counter.js';

/** The copy of a longer text is not kept for the next one. */
const KEPT_UNITS = 1 << 20;
let kept = new Uint16Array(0);

export function countText(text: string, words: WordCounter): void {
  const { length } = text;
  const units = length <= kept.length ? kept : new Uint16Array(length);
  if (length <= KEPT_UNITS) kept = units;
  Buffer.from(units.buffer).write(text, 'utf16le');
  for (let start = 0, end = 0; start < length; start = end) {
    end = wordEnd(units, length, start);
    words.add(units, start, end, 1);
  }
}
