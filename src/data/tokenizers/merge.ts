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

/** Token ids of one word, given as a binary string. Every single byte must have a rank. */
export function mergeBytePairs(word: string, ranks: Ranks): number[] {
  const length = word.length;
  // A linked list of parts, named by their first byte. `next[i]` is where the part after i begins.
  // Plain arrays: most words are a few bytes long, and typed arrays cost more to make than to use.
  const next: number[] = [];
  const previous: number[] = [];
  const pairRank: number[] = [];
  const heap: number[] = [];

  const offer = (part: number): void => {
    const second = next[part];
    const rank = second < length ? ranks.get(word.slice(part, next[second])) : undefined;
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
    pairRank[absorbed] = -1;
    next[part] = next[absorbed];
    previous[next[absorbed]] = part;
    offer(part);
    if (part > 0) offer(previous[part]);
  }

  const ids: number[] = [];
  for (let part = 0; part < length; part = next[part]) ids.push(ranks.get(word.slice(part, next[part]))!);
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
  // As above: parts are named by the index of their first id, which holds the id of the merged token.
  const next: number[] = [];
  const previous: number[] = [];
  const pairRank: number[] = [];
  const heap: number[] = [];
  const offer = (part: number): void => {
    const second = next[part];
    const rank = second < length ? pairs.get(ids[part] * base + ids[second])?.rank : undefined;
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
    if (pairRank[part] !== (entry - part) / POSITIONS) continue;
    const absorbed = next[part];
    ids[part] = pairs.get(ids[part] * base + ids[absorbed])!.id;
    pairRank[absorbed] = -1;
    next[part] = next[absorbed];
    previous[next[absorbed]] = part;
    offer(part);
    if (part > 0) offer(previous[part]);
  }
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
