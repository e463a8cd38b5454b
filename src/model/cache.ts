/**
 * The decode cache: what attention needs of the tokens a model has read, so that the next ones cost what they read and
 * not the whole context again.
 *
 * Per sequence and layer: keys and values of the selected branch for all tokens, of the window for its last w, the
 * compressed ones, and the raw rows that compressed blocks to come still need. All but the last lie in pages that hold one
 * block of every layer: memory grows by need, and sequences with a common beginning share it (`fork`).
 */
import type { Device } from '../device/device.js';
import { UsageError } from '../errors.js';
import type { HeadShape } from '../ops/attention.js';
import type { SparseLayout } from '../ops/nsa.js';
import { type NewTokens, type Pages, pageFloats, pageSizes } from '../ops/paged/op.js';
import { compressedCount, Sequences } from '../ops/sequences.js';
import { Tensor } from '../tensor/tensor.js';
import { PageList, PageStore } from './pages.js';
import { headShapeOf, type ModelShape } from './shape.js';

/** `tail`: one page with the raw rows. A dense model has the window alone, and it never ends. */
type Kind = 'sel' | 'win' | 'cmp' | 'tail';

interface KindLayout {
  /** Keys of a page. */
  readonly size: number;
  /** Floats of one layer in a page. */
  readonly floats: number;
}

/** How a model's cache is cut into pages on a device. */
function kindLayouts(shape: ModelShape, device: Device): Map<Kind, KindLayout> {
  const heads = headShapeOf(shape);
  const { block, lanes } = pageSizes(device);
  const page = (size: number) => ({ size, floats: pageFloats(heads, size, lanes) });
  if (shape.attention === 'dense') return new Map([['win', page(block)]]);
  const { l, l_sel } = shape.nsa;
  return new Map([
    ['sel', page(l_sel)],
    ['win', page(block)],
    ['cmp', page(block)],
    ['tail', { size: l, floats: l * rawRow(heads) }],
  ]);
}

function rawRow({ groups, dk, dv }: HeadShape): number {
  return groups * (dk + dv);
}

/** Tokens of the window branch; a dense model sees all. */
function windowOf({ attention, nsa }: ModelShape): number {
  return attention === 'dense' ? Number.POSITIVE_INFINITY : nsa.w;
}

/** First page of the window that the token at `position` or a later one reads. */
function firstWindowPage(position: number, w: number, size: number): number {
  return Math.floor(Math.max(0, position - w + 1) / size);
}

/** Bytes of the pages of one sequence of `length` tokens. */
export function cacheBytes(shape: ModelShape, device: Device, length: number): number {
  if (length === 0) return 0;
  const { l, d } = shape.nsa;
  let floats = 0;
  for (const [kind, { size, floats: perLayer }] of kindLayouts(shape, device)) {
    const upTo = (count: number) => Math.ceil(count / size);
    const counts: Record<Kind, number> = {
      sel: upTo(length),
      win: upTo(length) - Math.min(firstWindowPage(length, windowOf(shape), size), upTo(length)),
      cmp: upTo(compressedCount(length, l, d)),
      tail: 1,
    };
    floats += counts[kind] * perLayer * shape.n_layers;
  }
  return floats * Float32Array.BYTES_PER_ELEMENT;
}

/** Keys that a decode step at context length `S` reads per layer and group, by attention.md's formula. */
export function predictedReads({ nsa, attention }: ModelShape, S: number): number {
  if (attention === 'dense') return S;
  return compressedCount(S, nsa.l, nsa.d) + nsa.n_sel * nsa.l_sel + Math.min(nsa.w, S);
}

/** Why this device cannot decode from a cache; null if it can. */
export function cacheRefusal(device: Device): string | null {
  return device.kind === 'cpu' ? null : `the decode cache is not there yet on ${device.kind}`;
}

/** One sequence's place in a cache. */
export class CachedSequence {
  readonly cache: DecodeCache;
  readonly lists: ReadonlyMap<Kind, PageList>;
  #length: number;

  constructor(cache: DecodeCache, lists: ReadonlyMap<Kind, PageList>, length: number) {
    this.cache = cache;
    this.lists = lists;
    this.#length = length;
  }

  /** Tokens read so far. */
  get length(): number {
    return this.#length;
  }

  advance(count: number): void {
    this.#length += count;
  }

  /** A second sequence with the same beginning. Pages are shared until one of the two writes. */
  fork(): CachedSequence {
    const lists = new Map([...this.lists].map(([kind, list]) => [kind, list.fork()]));
    return new CachedSequence(this.cache, lists, this.#length);
  }

  free(): void {
    for (const list of this.lists.values()) list.free();
  }
}

export class DecodeCache {
  readonly device: Device;
  readonly shape: ModelShape;
  readonly #kinds: Map<Kind, KindLayout>;
  readonly #stores: Map<Kind, PageStore>;

  constructor(device: Device, shape: ModelShape) {
    const refusal = cacheRefusal(device);
    if (refusal !== null) throw new UsageError(refusal);
    this.device = device;
    this.shape = shape;
    this.#kinds = kindLayouts(shape, device);
    this.#stores = new Map(
      [...this.#kinds].map(([kind, { floats }]) => [kind, new PageStore(device, floats * shape.n_layers)]),
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

  /** Prepares a forward pass over `counts[i]` new tokens of each sequence. */
  begin(sequences: readonly CachedSequence[], counts: readonly number[]): CacheStep {
    if (new Set(sequences).size !== sequences.length) throw new Error('a sequence cannot be twice in one step');
    return new CacheStep(this.device, this.shape, this.#kinds, sequences, counts);
  }
}

/** One forward pass: where the new tokens stand and where each layer reads and writes. */
export class CacheStep {
  /** The new tokens, and the compressed blocks that they complete. */
  readonly layout: SparseLayout;
  readonly tokens: NewTokens;
  /** No sequence had tokens before: attention over the new tokens alone is attention over all. */
  readonly isFresh: boolean;
  /** The raw rows kept and the new ones. */
  readonly joined: Sequences;
  /** New compressed blocks by their number in the sequence, and by their position (i32 [sequences]). */
  readonly blocks: NewTokens;
  readonly blockPositions: Tensor;
  /** Rows of `joined` that no later block needs. */
  readonly done: Tensor;
  readonly #shape: ModelShape;
  readonly #kinds: Map<Kind, KindLayout>;
  readonly #sequences: readonly CachedSequence[];
  readonly #counts: readonly number[];
  readonly #tables: Map<Kind, Tensor>;

  constructor(
    device: Device,
    shape: ModelShape,
    kinds: Map<Kind, KindLayout>,
    sequences: readonly CachedSequence[],
    counts: readonly number[],
  ) {
    const { l, d } = shape.nsa;
    this.#shape = shape;
    this.#kinds = kinds;
    this.#sequences = sequences;
    this.#counts = counts;
    const numbers = (values: readonly number[]) => Tensor.from(device, values, [values.length], 'i32');
    const lengths = sequences.map(({ length }) => length);
    const known = lengths.map((length) => compressedCount(length, l, d));
    const sequencesOfTokens = new Sequences(device, counts);
    this.joined = new Sequences(
      device,
      counts.map((count, i) => lengths[i] - known[i] * d + count),
    );
    const sequencesOfBlocks = this.joined.compressed(l, d);
    this.tokens = { sequences: sequencesOfTokens, starts: numbers(lengths) };
    this.blocks = { sequences: sequencesOfBlocks, starts: numbers(known) };
    this.layout = { tokens: sequencesOfTokens, blocks: sequencesOfBlocks };
    this.blockPositions = numbers(known.map((count) => count * d));
    this.done = numbers(sequencesOfBlocks.lengths.map((count) => count * d));
    this.isFresh = lengths.every((length) => length === 0);
    this.#makeRoom(sequencesOfBlocks.lengths, known);
    this.#tables = new Map(
      [...kinds.keys()].map((kind) => {
        const tables = Tensor.empty(device, [sequences.length], 'f64');
        const addresses = BigUint64Array.from(sequences, ({ lists }) => listOf(lists, kind).tableAddress());
        tables.writeBytes(new Uint8Array(addresses.buffer));
        return [kind, tables];
      }),
    );
  }

  pages(kind: Kind, layer: number): Pages {
    const { size, floats } = listOf(this.#kinds, kind);
    return { tables: listOf(this.#tables, kind), place: layer * floats, size };
  }

  /** The raw keys or values of a layer. */
  tail(part: 'keys' | 'values', layer: number): Pages {
    const { tables, place, size } = this.pages('tail', layer);
    const { groups, dk } = headShapeOf(this.#shape);
    return { tables, place: place + (part === 'keys' ? 0 : size * groups * dk), size };
  }

  /** The pass has run: its tokens belong to the sequences. */
  commit(): void {
    const w = windowOf(this.#shape);
    const { size } = listOf(this.#kinds, 'win');
    this.#sequences.forEach((sequence, i) => {
      sequence.advance(this.#counts[i]);
      listOf(sequence.lists, 'win').dropBefore(firstWindowPage(sequence.length, w, size));
    });
  }

  free(): void {
    for (const tensor of [this.tokens.starts, this.blocks.starts, this.blockPositions, this.done]) tensor.free();
    for (const sequences of [this.layout.tokens, this.layout.blocks, this.joined]) sequences.free();
    for (const tables of this.#tables.values()) tables.free();
  }

  #makeRoom(newBlocks: readonly number[], known: readonly number[]): void {
    const w = windowOf(this.#shape);
    this.#sequences.forEach(({ lists, length }, i) => {
      const end = length + this.#counts[i];
      for (const [kind, { size }] of this.#kinds) {
        const list = listOf(lists, kind);
        const room = (from: number, to: number) => {
          if (to > from) list.writable(Math.floor(from / size), Math.ceil(to / size));
        };
        if (kind === 'sel') room(length, end);
        else if (kind === 'cmp') room(known[i], known[i] + newBlocks[i]);
        else if (kind === 'tail') room(0, size);
        // A prefill of everything at once needs no page of the tokens that its last window has left behind.
        else room(this.isFresh ? Math.max(0, end - w + 1) : length, end);
      }
    });
  }
}

function listOf<T>(map: ReadonlyMap<Kind, T>, kind: Kind): T {
  const value = map.get(kind);
  if (value === undefined) throw new Error(`this model has no ${kind} pages`);
  return value;
}
