/**
 * Byte-pair merging in O(n log n).
 *
 * gpt-tokenizer supplies the ranks, but its merge loop is quadratic in the length of a word: a megabyte of one letter or of
 * spaces, which web text and minified code contain, would run for days.
 */

/** Binary strings (one character per byte) to ranks; the rank is the token id. */
export type Ranks = ReadonlyMap<string, number>;

// A heap entry is rank * POSITIONS + position in one double: the order (rank, then leftmost) is plain number order.
const POSITIONS = 2 ** 32;

/**
 * Merges neighbouring parts of a list, the pair of the lowest rank first, the leftmost of equal ones, until none has a rank.
 * A part is named by the index of its first element. `rankOf` is asked about the part that begins at `part` and the one
 * that begins at `second` and ends before `end`; `onMerge` is told that the second was merged into the first. Returns, by
 * the beginning of a part, where the next one begins.
 */
function mergeParts(
  length: number,
  rankOf: (part: number, second: number, end: number) => number | undefined,
  onMerge?: (part: number, second: number) => void,
): readonly number[] {
  // A linked list. Plain arrays: most words are a few bytes long, and typed arrays cost more to make than to use.
  const next: number[] = [];
  const previous: number[] = [];
  const pairRank: number[] = [];
  const heap: number[] = [];

  const offer = (part: number): void => {
    const second = next[part];
    const rank = second < length ? rankOf(part, second, next[second]) : undefined;
    pairRank[part] = rank ?? -1;
    if (rank !== undefined) push(heap, rank * POSITIONS + part);
  };

  for (let index = 0; index <= length; index++) {
    next.push(index + 1);
    previous.push(index - 1);
    pairRank.push(-1);
  }
  for (let part = 0; part < length; part++) offer(part);

  while (heap.length > 0) {
    const entry = pop(heap);
    const part = entry % POSITIONS;
    // Entries are not removed when a neighbour merges: stale ones are skipped here.
    if (pairRank[part] !== (entry - part) / POSITIONS) continue;
    const absorbed = next[part];
    onMerge?.(part, absorbed);
    pairRank[absorbed] = -1;
    next[part] = next[absorbed];
    previous[next[absorbed]] = part;
    offer(part);
    if (part > 0) offer(previous[part]);
  }
  return next;
}

/** Token ids of one word, given as a binary string. Every single byte must have a rank. */
export function mergeBytePairs(word: string, ranks: Ranks): number[] {
  const next = mergeParts(word.length, (part, _second, end) => ranks.get(word.slice(part, end)));
  const ids: number[] = [];
  for (let part = 0; part < word.length; part = next[part]) ids.push(ranks.get(word.slice(part, next[part]))!);
  return ids;
}

/** Longest word that is merged by searching all its pairs for the lowest rank: for short words that is faster. */
const SHORT_WORD = 64;
/** Slots of the cache of pairs: 2^16. */
const PAIR_BITS = 16;
const NO_RANK = 2 ** 31 - 1;

/** `mergeBytePairs` for many words of the same ranks: remembers pairs, and has no heap for short words. */
export function createMerger(ranks: Ranks): (word: string) => readonly number[] {
  const byteIds = Int32Array.from({ length: 256 }, (_, byte) => ranks.get(String.fromCharCode(byte)) ?? NO_RANK);
  // A cache of ranks by pairs of ids: a later pair replaces an earlier one of the same slot.
  const pairs = new Float64Array(1 << PAIR_BITS).fill(-1);
  const pairRanks = new Int32Array(1 << PAIR_BITS);
  // The parts of the word: ids, first bytes, and ranks of the pairs with the next part.
  const ids = new Int32Array(SHORT_WORD);
  const begins = new Int32Array(SHORT_WORD + 1);
  const rankOfPair = new Int32Array(SHORT_WORD);

  const findRank = (word: string, part: number): number => {
    const left = ids[part];
    const right = ids[part + 1];
    const pair = left * POSITIONS + right;
    const slot = (Math.imul(left, 0x9e3779b1) ^ Math.imul(right, 0x85ebca6b)) >>> (32 - PAIR_BITS);
    if (pairs[slot] !== pair) {
      pairs[slot] = pair;
      pairRanks[slot] = ranks.get(word.slice(begins[part], begins[part + 2])) ?? NO_RANK;
    }
    return pairRanks[slot];
  };

  return (word) => {
    if (word.length > SHORT_WORD) return mergeBytePairs(word, ranks);
    let count = word.length;
    for (let part = 0; part < count; part++) {
      ids[part] = byteIds[word.charCodeAt(part)];
      begins[part] = part;
    }
    begins[count] = count;
    for (let part = 0; part + 1 < count; part++) rankOfPair[part] = findRank(word, part);
    for (;;) {
      let best = -1;
      let rank = NO_RANK;
      for (let part = 0; part + 1 < count; part++) {
        if (rankOfPair[part] >= rank) continue;
        best = part;
        rank = rankOfPair[part];
      }
      if (best < 0) break;
      count--;
      ids[best] = rank;
      for (let part = best + 1; part < count; part++) {
        ids[part] = ids[part + 1];
        begins[part] = begins[part + 1];
        rankOfPair[part] = rankOfPair[part + 1];
      }
      begins[count] = word.length;
      if (best + 1 < count) rankOfPair[best] = findRank(word, best);
      if (best > 0) rankOfPair[best - 1] = findRank(word, best - 1);
    }
    const merged: number[] = [];
    for (let part = 0; part < count; part++) merged.push(ids[part]);
    return merged;
  };
}

/** Merges by pairs of token ids: a tokenizer.json lists them apart from the vocabulary. */
export interface PairMerges {
  /** More than every id. */
  readonly base: number;
  /** By `left * base + right`. */
  readonly pairs: ReadonlyMap<number, { readonly rank: number; readonly id: number }>;
}

/** Merges the pair of the lowest rank, the leftmost first, until none is left. `ids` is used up. */
export function mergePairs(ids: number[], { base, pairs }: PairMerges): readonly number[] {
  const { length } = ids;
  if (length < 2) return ids;
  // The first index of a part holds the id of the merged token.
  const pairOf = (part: number, second: number) => pairs.get(ids[part] * base + ids[second]);
  const next = mergeParts(
    length,
    (part, second) => pairOf(part, second)?.rank,
    (part, second) => {
      ids[part] = pairOf(part, second)!.id;
    },
  );
  const merged: number[] = [];
  for (let part = 0; part < length; part = next[part]) merged.push(ids[part]);
  return merged;
}

function push(heap: number[], value: number): void {
  let child = heap.length;
  heap.push(value);
  while (child > 0) {
    const parent = (child - 1) >> 1;
    if (heap[parent] <= value) break;
    heap[child] = heap[parent];
    child = parent;
  }
  heap[child] = value;
}

function pop(heap: number[]): number {
  const smallest = heap[0];
  const last = heap.pop()!;
  const size = heap.length;
  if (size === 0) return smallest;
  let parent = 0;
  for (;;) {
    let child = 2 * parent + 1;
    if (child >= size) break;
    if (child + 1 < size && heap[child + 1] < heap[child]) child++;
    if (heap[child] >= last) break;
    heap[parent] = heap[child];
    parent = child;
  }
  heap[parent] = last;
  return smallest;
}
