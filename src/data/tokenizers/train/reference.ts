/** The merges of a byte-pair encoding, the obvious way: all pairs are counted anew for every merge. */

import { type Merges, MIN_COUNT, SYMBOL_OF_BYTE } from './merges.js';

/** `words` with their counts. */
export function referenceMerges(words: ReadonlyMap<string, number>, count: number): Merges {
  const lists = [...words].map(([word, times]) => ({
    symbols: Array.from(Buffer.from(word, 'utf8'), (byte) => SYMBOL_OF_BYTE[byte]),
    times,
  }));
  const left: number[] = [];
  const right: number[] = [];
  while (left.length < count) {
    const counts = new Map<string, number>();
    for (const { symbols, times } of lists)
      for (let i = 0; i + 1 < symbols.length; i++) {
        const pair = `${symbols[i]} ${symbols[i + 1]}`;
        counts.set(pair, (counts.get(pair) ?? 0) + times);
      }
    const [best] = [...counts]
      .map(([pair, times]) => ({ times, pair: pair.split(' ').map(Number) }))
      .filter(({ times }) => times >= MIN_COUNT)
      .sort((a, b) => b.times - a.times || a.pair[0] - b.pair[0] || a.pair[1] - b.pair[1]);
    if (best === undefined) break;
    const [first, second] = best.pair;
    for (const list of lists) {
      const merged: number[] = [];
      for (let i = 0; i < list.symbols.length; i++) {
        const isPair = list.symbols[i] === first && list.symbols[i + 1] === second;
        merged.push(isPair ? 256 + left.length : list.symbols[i]);
        if (isPair) i++;
      }
      list.symbols = merged;
    }
    left.push(first);
    right.push(second);
  }
  return { left: Int32Array.from(left), right: Int32Array.from(right) };
}
