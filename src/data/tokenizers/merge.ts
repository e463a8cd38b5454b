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
