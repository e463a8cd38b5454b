/** The words of a text, by GPT-2's pattern, in a counter. */

import { wordEnd } from '../gpt2-words.js';
import { UnitBuffer } from '../unit-buffer.js';
import type { WordCounter } from './word-counter.js';

const buffer = new UnitBuffer();

export function countText(text: string, words: WordCounter): void {
  const { length } = text;
  const units = buffer.of(text);
  for (let start = 0, end = 0; start < length; start = end) {
    end = wordEnd(units, length, start);
    words.add(units, start, end, 1);
  }
}
