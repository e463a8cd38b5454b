/**
 * The decode cache: keys and values of the tokens that a model has read, so that a new token does not recompute the
 * context.
 *
 * Per sequence and layer it holds keys and values of the selected branch for all tokens, of the window branch for the
 * last w tokens (unless the branches share theirs: then the window reads those of the selected branch), the compressed
 * keys and values, and the raw rows that future compressed blocks need. A layer with a window alone has only the window's.
 * They are stored in pages that hold one block of every layer, so memory grows on demand and forks share their common
 * prefix.
 */
import type { Device } from '../device/device.js';
import { UsageError } from '../errors.js';
import { greatestCommonDivisor } from '../numbers.js';
import { type NewTokens, type Pages, pageNumbers, pageSizes } from '../ops/attention/decode/paged/op.js';
import type { HeadShape } from '../ops/attention/shape.js';
import { compressedCount, Sequences } from '../ops/common/sequences.js';
import { dispose } from '../tensor/dispose.js';
import { DTYPE_BYTES, Tensor } from '../tensor/tensor.js';
import { PageList, PageStore } from './pages.js';
import {
  type ComputeDtype,
  defaultDtype,
  headShapeOf,
  type ModelShape,
  shapeDifference,
  sparseLayers,
} from './shape.js';

/** Kinds of pages. `tail`: one page with the raw rows. A dense model has only `win`, with an unlimited window. */
export type PageKind = 'sel' | 'win' | 'cmp' | 'tail';

/** How pages of one kind are laid out. */
export interface KindLayout {
  /** Keys of a page. */
  readonly size: number;
  /** Numbers of one layer in a page. */
  readonly numbers: number;
  /** The layers that have such pages. A page holds the parts of all of them, in this order. */
  readonly layers: readonly number[];
}

/** The page layout of every kind for a model on a device, with raw rows of `drafts` tokens that may be taken back. */
function kindLayouts(shape: ModelShape, device: Device, drafts = 0): Map<PageKind, KindLayout> {
  const heads = headShapeOf(shape);
  const { block, lanes } = pageSizes(device);
  const page = (size: number, layers: readonly number[]) => ({
    size,
    numbers: pageNumbers(heads, size, lanes),
    layers,
  });
  const all = Array.from({ length: shape.nLayers }, (_, layer) => layer);
  if (shape.attention === 'dense') return new Map([['win', page(block, all)]]);
  const { l, lSel, sharedKv } = shape.nsa;
  const sparse = sparseLayers(shape);
  // A sparse layer whose branches share keys and values has its window in the pages of the selected branch.
  const windows = sharedKv ? all.filter((layer) => !sparse.includes(layer)) : all;
  return new Map([
    ['sel', page(lSel, sparse)],
    ...(windows.length > 0 ? [['win', page(block, windows)] as const] : []),
    ['cmp', page(block, sparse)],
    ['tail', { size: l + drafts, numbers: (l + drafts) * rawRow(heads), layers: sparse }],
  ]);
}

function rawRow({ groups, dk, dv }: HeadShape): number {
  return groups * (dk + dv);
}

/** Window size in tokens; Infinity for dense attention. */
function windowOf({ attention, nsa }: ModelShape): number {
  return attention === 'dense' ? Number.POSITIVE_INFINITY : nsa.w;
}

/** First page of the window that the token at `position` or a later one reads. */
function firstWindowPage(position: number, w: number, size: number): number {
  return Math.floor(Math.max(0, position - w + 1) / size);
}

/** Keys that a decode step at context length `S` reads per group of a sparse layer, by attention.md's formula. */
export function predictedReads({ nsa, attention }: ModelShape, S: number): number {
  if (attention === 'dense') return S;
  return compressedCount(S, nsa.l, nsa.d) + nsa.nSel * nsa.lSel + Math.min(nsa.w, S);
}

/** The cached keys and values of one sequence. */
export class CachedSequence implements Disposable {
  readonly cache: DecodeCache;
  readonly lists: ReadonlyMap<PageKind, PageList>;
  #length: number;
  #settled: number;
  #forks = 0;
  #isFreed = false;

  constructor(cache: DecodeCache, lists: ReadonlyMap<PageKind, PageList>, length: number, settled = length) {
    this.cache = cache;
    this.lists = lists;
    this.#length = length;
    this.#settled = settled;
  }

  /** Tokens read so far. */
  get length(): number {
    return this.#length;
  }

  /** The address of the table of its pages on the device, up to date. */
  table(kind: PageKind): bigint {
    return listOf(this.lists, kind).tableAddress();
  }

  /** The least length that `truncate` takes. The raw rows in the cache begin with those that this length needs. */
  get settled(): number {
    return this.#settled;
  }

  /** Moves the end of the sequence by this many tokens. The last `drafts` of them may be taken back. */
  advance(count: number, drafts = 0): void {
    this.#length += count;
    this.#settled = this.#length - drafts;
  }

  /** Takes back the drafts after the first `length` tokens. */
  truncate(length: number): void {
    if (length < this.#settled || length > this.#length)
      throw new Error(`a sequence of ${this.#length} tokens, ${this.#settled} settled, cannot have ${length}`);
    this.#length = length;
  }

  /** Number of forks taken. Each may have made an unshared page shared. */
  get forks(): number {
    return this.#forks;
  }

  /** A second sequence with the same beginning. Pages are shared until one of the two writes. */
  fork(): CachedSequence {
    this.#forks += 1;
    const lists = new Map([...this.lists].map(([kind, list]) => [kind, list.fork()]));
    return new CachedSequence(this.cache, lists, this.#length, this.#settled);
  }

  /** Returns its pages. */
  free(): void {
    if (this.#isFreed) throw new Error('a cached sequence was freed twice');
    this.#isFreed = true;
    for (const list of this.lists.values()) list.free();
  }

  /** `free`, for `using`. */
  [dispose](): void {
    if (!this.#isFreed) this.free();
  }
}

/** Keys and values of the tokens that sequences have read, in pages. */
export class DecodeCache {
  readonly device: Device;
  readonly shape: ModelShape;
  readonly dtype: ComputeDtype;
  readonly #kinds: Map<PageKind, KindLayout>;
  readonly #stores: Map<PageKind, PageStore>;
  readonly #drafts: number;

  /** `dtype`: that of the model. `drafts`: the most tokens of a pass that can be taken back; on the CPU only. */
  constructor(device: Device, shape: ModelShape, dtype: ComputeDtype = defaultDtype(device), drafts = 0) {
    this.device = device;
    this.shape = shape;
    this.dtype = dtype;
    this.#drafts = drafts;
    this.#kinds = kindLayouts(shape, device, drafts);
    this.#stores = new Map(
      [...this.#kinds].map(([kind, { numbers, layers }]) => [
        kind,
        new PageStore(device, numbers * layers.length, dtype),
      ]),
    );
  }

  /** Memory of all pages that some sequence holds. */
  get bytes(): number {
    return [...this.#stores.values()].reduce((total, { bytes }) => total + bytes, 0);
  }

  /** An empty sequence; the caller frees it. */
  sequence(): CachedSequence {
    return new CachedSequence(this, new Map([...this.#stores].map(([kind, store]) => [kind, new PageList(store)])), 0);
  }

  /** The kinds of pages that sequences of this model have. */
  get kinds(): PageKind[] {
    return [...this.#kinds.keys()];
  }

  /**
   * Upper bound of the memory that one sequence takes on its way to `length` tokens when passes read at most `tile` of
   * them: during a pass the window holds the pages of the whole tile.
   */
  mostBytes(length: number, tile: number): number {
    const { l, d } = this.shape.nsa;
    return this.#pageBytes((kind, size) => {
      const all = Math.ceil(length / size);
      if (kind === 'tail') return 1;
      if (kind === 'cmp') return Math.ceil(compressedCount(length, l, d) / size);
      return kind === 'sel' ? all : Math.min(all, Math.ceil((windowOf(this.shape) + tile) / size) + 1);
    });
  }

  /** Memory that a snapshot (a fork that is kept) adds to one taken `tokens` earlier, for a multiple of `pageTokens`. */
  blockBytes(tokens: number): number {
    const { d } = this.shape.nsa;
    return this.#pageBytes((kind, size) => {
      if (kind === 'tail') return 1;
      // The last page of compressed keys is not full: each snapshot keeps its own.
      return kind === 'cmp' ? Math.ceil(tokens / d / size) + 1 : Math.ceil(tokens / size);
    });
  }

  /**
   * Memory of the pages that the tokens of `sequence` from `from` on are in, in a fixed order: with those of the tokens
   * before, all that a later token reads. `from` and the length are multiples of `pageTokens`.
   */
  blockPages({ lists, length }: CachedSequence, from: number): Tensor[] {
    return [...this.#kinds].flatMap(([kind, { size }]) => {
      const [first, end] = pagesOfBlock(kind, size, from, length, this.shape);
      return listOf(lists, kind).memory(first, end);
    });
  }

  /** Bytes of these pages for a block from token `from` to token `to`. */
  blockPageBytes(from: number, to: number): number {
    return this.#pageBytes((kind, size) => {
      const [first, end] = pagesOfBlock(kind, size, from, to, this.shape);
      return end - first;
    });
  }

  /** Adds `count` tokens whose pages the caller fills (`blockPages`). */
  append(sequence: CachedSequence, count: number): void {
    makeRoom(sequence, sequence.length + count, this.#kinds, this.shape, { isFresh: false, isZeroed: false });
    grow(sequence, count, this.#kinds, this.shape);
  }

  /** Everything that determines the content of pages besides the weights: page sizes, layers and the number type. */
  get layout(): readonly unknown[] {
    return [this.dtype, this.shape.nLayers, ...this.#kinds];
  }

  /** The least number of tokens that fills whole pages of the selected branch and the window. */
  get pageTokens(): number {
    const sizes = [...this.#kinds].flatMap(([kind, { size }]) => (kind === 'sel' || kind === 'win' ? [size] : []));
    return sizes.reduce(leastCommonMultiple);
  }

  #pageBytes(pages: (kind: PageKind, size: number) => number): number {
    let numbers = 0;
    for (const [kind, layout] of this.#kinds)
      numbers += pages(kind, layout.size) * layout.numbers * layout.layers.length;
    return numbers * DTYPE_BYTES[this.dtype];
  }

  /** One layer's part of the pages of a kind; `tables`: addresses of the sequences' tables (`CachedSequence.table`). */
  pages(kind: PageKind, layer: number, tables: Tensor<'address'>): Pages {
    return pagesOf(this.#kinds, kind, layer, tables);
  }

  /**
   * Allocates pages for `count` more tokens, which device steps will write. `CachedSequence.table` may change. A fork shares
   * pages of tokens that are not there yet, too.
   */
  reserve(sequence: CachedSequence, count = 1): void {
    makeRoom(sequence, sequence.length + count, this.#kinds, this.shape, { isFresh: false });
  }

  /** Records that the token of `reserve` was written. */
  grow(sequence: CachedSequence): void {
    grow(sequence, 1, this.#kinds, this.shape);
  }

  /**
   * Number of tokens after the reserved one that need no new pages and free none. As long as the sequence is not forked,
   * `advance` replaces `reserve` and `grow` for them.
   */
  slack({ length, lists }: CachedSequence): number {
    const { l, d } = this.shape.nsa;
    const w = windowOf(this.shape);
    let tokens = Number.POSITIVE_INFINITY;
    for (const [kind, { size }] of this.#kinds) {
      if (kind === 'sel' || kind === 'win') tokens = Math.min(tokens, size - (length % size));
      if (kind === 'win') tokens = Math.min(tokens, (firstWindowPage(length + 1, w, size) + 1) * size + w - 2 - length);
      if (kind !== 'cmp') continue;
      const blocks = compressedCount(length + 1, l, d);
      // A token that completes no block leaves a shared page shared: it is copied for the first one that does.
      const isShared = listOf(lists, kind).isShared(Math.floor(blocks / size));
      const first = isShared ? blocks : Math.ceil(blocks / size) * size;
      tokens = Math.min(tokens, l + first * d - 1 - length);
    }
    return Math.max(1, tokens);
  }

  /**
   * Names the sizes of a pass over one new token of each sequence: passes with one name differ only in the contents of device
   * memory (`CacheStep.move`).
   */
  sizesOfStep(sequences: readonly CachedSequence[]): string {
    if (!this.#kinds.has('cmp')) return `${sequences.length}`;
    const { l, d } = this.shape.nsa;
    let [rows, blocks] = [0, 0];
    for (const { length, settled } of sequences) {
      const known = compressedCount(settled, l, d);
      rows += length - known * d + 1;
      blocks += compressedCount(length - known * d + 1, l, d);
    }
    return `${sequences.length} ${rows} ${blocks}`;
  }

  /** Prepares a forward pass over `counts[i]` new tokens of each sequence, the last `drafts[i]` of which are drafts. */
  begin(
    sequences: readonly CachedSequence[],
    counts: readonly number[],
    drafts: readonly number[] = counts.map(() => 0),
  ): CacheStep {
    if (new Set(sequences).size !== sequences.length)
      throw new UsageError('a cached sequence was given twice: fork() it to continue it in two ways');
    if (sequences.length !== counts.length)
      throw new UsageError(`${sequences.length} cached sequences were given tokens for ${counts.length}`);
    if (sequences.some(({ cache }) => cache !== this))
      throw new UsageError('the cached sequences of one step must belong to the same DecodeCache');
    const empty = counts.findIndex((count) => count < 1);
    if (empty !== -1) throw new UsageError(`sequence ${empty} was given no token: each needs at least one`);
    if (drafts.some((count, i) => count > this.#drafts || count >= counts[i]))
      throw new Error(`drafts of ${drafts.join(', ')} tokens in a cache for ${this.#drafts}`);
    return new CacheStep(this.device, this.shape, this.#kinds, sequences, counts, drafts);
  }
}

/**
 * One forward pass: positions of the new tokens, and the pages that each layer reads and writes.
 *
 * @opaque
 */
export class CacheStep {
  readonly tokens: NewTokens;
  /** All sequences were empty, so attention over the new tokens alone is complete. */
  readonly isFresh: boolean;
  /** The raw rows kept and the new ones. */
  readonly joined: Sequences;
  /** New compressed blocks by their number in the sequence, and by their position (i32 [sequences]). */
  readonly blocks: NewTokens;
  readonly blockPositions: Tensor;
  /** Rows of `joined` that no later block needs. */
  readonly done: Tensor;
  readonly #shape: ModelShape;
  readonly #kinds: Map<PageKind, KindLayout>;
  #sequences: readonly CachedSequence[];
  readonly #counts: readonly number[];
  readonly #drafts: readonly number[];
  readonly #tables: Map<PageKind, Tensor<'address'>>;
  #wholes: readonly WholeSequence[] | null = null;

  constructor(
    device: Device,
    shape: ModelShape,
    kinds: Map<PageKind, KindLayout>,
    sequences: readonly CachedSequence[],
    counts: readonly number[],
    drafts: readonly number[],
  ) {
    this.#drafts = drafts;
    this.#shape = shape;
    this.#kinds = kinds;
    this.#sequences = sequences;
    this.#counts = counts;
    const { lengths, known, joined, positions, done } = placesOf(sequences, counts, drafts, shape);
    const numbers = (values: readonly number[]) => Tensor.from(device, values, [values.length], 'i32');
    this.joined = new Sequences(device, joined);
    this.tokens = { sequences: new Sequences(device, counts), starts: numbers(lengths) };
    this.blocks = { sequences: this.joined.compressed(shape.nsa), starts: numbers(known) };
    this.blockPositions = numbers(positions);
    this.done = numbers(done);
    this.isFresh = lengths.every((length) => length === 0);
    this.#tables = new Map(
      [...kinds.keys()].map((kind) => [kind, Tensor.empty(device, [sequences.length], 'address')]),
    );
    this.#makeRoom();
  }

  /**
   * Prepares the next pass over the same numbers of new tokens, of these sequences, which are not empty. Device memory keeps
   * its place, so that launches that were recorded with this step compute it.
   */
  move(sequences: readonly CachedSequence[]): void {
    const { lengths, known, joined, positions, done } = placesOf(sequences, this.#counts, this.#drafts, this.#shape);
    this.#sequences = sequences;
    this.tokens.starts.write(lengths);
    if (this.#kinds.has('cmp')) {
      this.joined.replace(joined);
      this.blocks.starts.write(known);
      this.blockPositions.write(positions);
      this.done.write(done);
    }
    this.#makeRoom();
  }

  /** Allocates the pages of the new tokens, and tells the device where all are. */
  #makeRoom(): void {
    this.#sequences.forEach((sequence, i) => {
      const end = sequence.length + this.#counts[i];
      makeRoom(sequence, end, this.#kinds, this.#shape, { isFresh: this.isFresh && this.#drafts[i] === 0 });
    });
    for (const [kind, tables] of this.#tables) tables.write(this.#sequences.map((sequence) => sequence.table(kind)));
  }

  /** Each sequence with its new tokens as if nothing of it were cached. Made when first used, freed with the step. */
  wholes(): readonly WholeSequence[] {
    this.#wholes ??= this.#sequences.map(({ length: start }, i) => {
      const { device } = this.tokens.sequences;
      const tokens = new Sequences(device, [start + this.#counts[i]]);
      const zero = Tensor.zeros(device, [1], 'i32');
      return {
        start,
        first: this.tokens.sequences.starts[i],
        tokens: { sequences: tokens, starts: zero },
        blocks: { sequences: tokens.compressed(this.#shape.nsa), starts: zero },
        pages: (kind, layer) => {
          const pages = this.pages(kind, layer);
          return { ...pages, tables: pages.tables.rows(i, i + 1) };
        },
      };
    });
    return this.#wholes;
  }

  /** Throws unless the cache was made for a model of this shape. */
  expectShape(shape: ModelShape): void {
    const difference = shape === this.#shape ? null : shapeDifference(this.#shape, shape);
    if (difference !== null)
      throw new UsageError(`the DecodeCache was made for another model than the one that reads (${difference})`);
  }

  /** The pages of one kind in one layer, for all sequences of the step. */
  pages(kind: PageKind, layer: number): Pages {
    return pagesOf(this.#kinds, kind, layer, listOf(this.#tables, kind));
  }

  /** The raw keys or values of a layer. */
  tail(part: 'keys' | 'values', layer: number): Pages {
    const { tables, place, size } = this.pages('tail', layer);
    const { nKvGroups, dK } = this.#shape;
    return { tables, place: place + (part === 'keys' ? 0 : size * nKvGroups * dK), size };
  }

  /** Adds the tokens of the pass to the sequences. Called after it has run. */
  commit(): void {
    this.#sequences.forEach((sequence, i) => {
      grow(sequence, this.#counts[i], this.#kinds, this.#shape, this.#drafts[i]);
    });
  }

  /** Frees the tables of the step; the pages stay with their sequences. */
  free(): void {
    for (const tensor of [this.tokens.starts, this.blocks.starts, this.blockPositions, this.done]) tensor.free();
    for (const sequences of [this.tokens.sequences, this.joined]) sequences.free();
    for (const tables of this.#tables.values()) tables.free();
    for (const { tokens } of this.#wholes ?? []) for (const table of [tokens.sequences, tokens.starts]) table.free();
  }
}

/** Where the new tokens of a pass stand, and the compressed blocks that they fill; one number for each sequence. */
interface Places {
  readonly lengths: readonly number[];
  /** Compressed blocks that are in the cache. */
  readonly known: readonly number[];
  /** Position of the first block after them. */
  readonly positions: readonly number[];
  /** Raw rows kept and new. */
  readonly joined: readonly number[];
  /** Those of them that no later block needs. */
  readonly done: readonly number[];
}

function placesOf(
  sequences: readonly CachedSequence[],
  counts: readonly number[],
  drafts: readonly number[],
  { nsa: { l, d } }: ModelShape,
): Places {
  const lengths = sequences.map(({ length }) => length);
  // Blocks of drafts that were accepted are computed again, from the same raw rows: the kept rows begin before them.
  const known = sequences.map(({ settled }) => compressedCount(settled, l, d));
  const settled = lengths.map((length, i) => length + counts[i] - drafts[i]);
  return {
    lengths,
    known,
    positions: known.map((count) => count * d),
    joined: counts.map((count, i) => lengths[i] - known[i] * d + count),
    done: settled.map((length, i) => (compressedCount(length, l, d) - known[i]) * d),
  };
}

/** A sequence of a step from its beginning on. */
export interface WholeSequence {
  /** Its tokens before this one were cached before the step. */
  readonly start: number;
  /** Its first new token among those of the step. */
  readonly first: number;
  readonly tokens: NewTokens;
  readonly blocks: NewTokens;
  /** Its pages of one kind in one layer. */
  pages(kind: PageKind, layer: number): Pages;
}

function leastCommonMultiple(a: number, b: number): number {
  return (a / greatestCommonDivisor(a, b)) * b;
}

function pagesOf(
  kinds: ReadonlyMap<PageKind, KindLayout>,
  kind: PageKind,
  layer: number,
  tables: Tensor<'address'>,
): Pages {
  const { size, numbers, layers } = listOf(kinds, kind);
  const index = layers.indexOf(layer);
  if (index < 0) throw new Error(`layer ${layer} has no ${kind} pages`);
  return { tables, place: index * numbers, size };
}

/** The pages `[first, end)` of one kind that tokens `from` to `to` of a sequence of `to` tokens are in. */
function pagesOfBlock(kind: PageKind, size: number, from: number, to: number, shape: ModelShape): [number, number] {
  const { l, d } = shape.nsa;
  if (kind === 'tail') return [0, 1];
  if (kind === 'cmp')
    return [Math.floor(compressedCount(from, l, d) / size), Math.ceil(compressedCount(to, l, d) / size)];
  const first = kind === 'win' ? firstWindowPage(to, windowOf(shape), size) : 0;
  return [Math.max(from / size, Math.min(first, to / size)), to / size];
}

/** Adds `count` written tokens, and releases window pages that no later token reads. */
function grow(
  sequence: CachedSequence,
  count: number,
  kinds: ReadonlyMap<PageKind, KindLayout>,
  shape: ModelShape,
  drafts = 0,
): void {
  sequence.advance(count, drafts);
  const size = kinds.get('win')?.size;
  if (size !== undefined)
    listOf(sequence.lists, 'win').dropBefore(firstWindowPage(sequence.settled, windowOf(shape), size));
}

/** Allocates or copies the pages that tokens `sequence.length` to `end` (exclusive) are written to. */
function makeRoom(
  { lists, length, settled }: CachedSequence,
  end: number,
  kinds: ReadonlyMap<PageKind, KindLayout>,
  shape: ModelShape,
  { isFresh, isZeroed = true }: { readonly isFresh: boolean; readonly isZeroed?: boolean },
): void {
  const { l, d } = shape.nsa;
  for (const [kind, { size }] of kinds) {
    const list = listOf(lists, kind);
    const room = (from: number, to: number) => {
      if (to > from) list.writable(Math.floor(from / size), Math.ceil(to / size), isZeroed);
    };
    if (kind === 'sel') room(length, end);
    else if (kind === 'cmp') room(compressedCount(settled, l, d), compressedCount(end, l, d));
    else if (kind === 'tail') room(0, size);
    // A prefill in one pass stores only the keys that the window of the next token reads.
    else room(isFresh ? Math.max(0, end - windowOf(shape) + 1) : length, end);
  }
}

function listOf<T>(map: ReadonlyMap<PageKind, T>, kind: PageKind): T {
  const value = map.get(kind);
  if (value === undefined) throw new Error(`this model has no ${kind} pages`);
  return value;
}
