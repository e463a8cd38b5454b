/**
 * Prefixes of earlier requests, to be continued without reading them again.
 *
 * A node holds a fork of a sequence at a multiple of `block` tokens, or before the last token of a prompt, which repeats
 * and continues of that prompt begin with. Forks share pages, so a node costs the pages of the blocks since its parent: keys
 * of the selected and the compressed branch, the window, and the raw rows at its end. Nodes form a tree, named by a hash over
 * the salt and all tokens from the start. Only leaves are evicted, the least recently used first, so that the cost of a node
 * stays what it was.
 *
 * With files, every node of whole blocks is also written to disk in the background, a file holding the pages since its parent;
 * copies are made between steps, a piece at a time. Another file holds the logits after a prompt: a repeat begins its answer
 * with them, before its pages are there.
 */
import { createHash } from 'node:crypto';
import { setImmediate, setTimeout } from 'node:timers/promises';
import type { CachedSequence, DecodeCache } from '../../../model/cache.js';
import { checksums } from '../../../ops/checksum/op.js';
import { Tensor } from '../../../tensor/tensor.js';
import type { PrefixFiles } from './files.js';
import { PrefixKeys } from './keys.js';
import { joined, PrefixReader } from './load.js';

interface Node {
  readonly key: string;
  readonly parent: Node | null;
  /** Blocks since the parent, the last one perhaps not whole. */
  readonly blocks: number;
  readonly sequence: CachedSequence;
  /** Whether it is before the last token of a prompt. Such nodes have no children and no files. */
  readonly isEnd: boolean;
  children: number;
  /** Lengths of the children that are ends of prompts, and how many there are of each. */
  readonly ends: Map<number, number>;
  usedAt: number;
  /** Time of use of its file [s since 1970]; 0 before the first. */
  fileTime: number;
}

/** The logits after a prompt, to be written. */
interface Logits {
  readonly key: string;
  /** Tokens of the prompt. */
  readonly length: number;
  readonly logits: Float32Array;
  readonly fileTime: number;
}

/** Where prefixes are stored besides memory. */
export interface PrefixStorage {
  readonly files: PrefixFiles;
  /** Identifies everything that the content of pages depends on besides tokens, as hex digits. */
  readonly fingerprint: string;
  /** Whether a prompt is being read, which copies to the host would delay. */
  isReading(): boolean;
}

/** Tokens of a block: a multiple of the page sizes, so that a node shares whole pages, and at least `tile`. */
export function prefixBlock(cache: DecodeCache, tile: number): number {
  const unit = cache.pageTokens;
  return Math.ceil(tile / unit) * unit;
}

/** Files are younger than those of the next block by this [s]: the end of a text is deleted before its beginning. */
const DEPTH_TIME = 1e-5;
/** The time of use of a file is exact to this [s]. */
const TIME_RESOLUTION = 60;
/** Bytes that are copied to the host at once, between two steps. */
const PIECE = 4 * 2 ** 20;
/** A file waits until no prompt is read, which is looked at every few milliseconds, but at most so long [ms]. */
const LOOK_MS = 2;
const MAX_WAIT_MS = 1000;

export class PrefixCache {
  /** Tokens looked up, tokens found, and those of them that came from files. */
  queries = 0;
  hits = 0;
  fileHits = 0;
  readonly #cache: DecodeCache;
  readonly #block: number;
  readonly #most: number;
  readonly #storage: PrefixStorage | null;
  readonly #reader: PrefixReader | null;
  readonly #nodes = new Map<string, Node>();
  /** Blocks of all nodes; at most `#most`. */
  #blocks = 0;
  readonly #unwritten = new Set<Node | Logits>();
  #writer: Promise<void> | null = null;
  /** Number of calls of `load` that have not ended, and what is called when the last has. */
  #loading = 0;
  #onLoaded: () => void = () => {};
  #failure: unknown = null;
  #clock = 0;

  constructor(cache: DecodeCache, block: number, bytes: number, storage: PrefixStorage | null = null) {
    this.#cache = cache;
    this.#block = block;
    this.#most = Math.floor(bytes / cache.blockBytes(block));
    this.#storage = storage;
    this.#reader = storage ? new PrefixReader(cache, storage.files, block) : null;
  }

  get files(): PrefixFiles | null {
    return this.#storage?.files ?? null;
  }

  /** Tokens from `length` to the end of its block. */
  untilBlock(length: number): number {
    return this.#block - (length % this.#block);
  }

  /** At most `most` tokens after `length`, to the end of a block if there is one: a pass ends there, so that it can be kept. */
  untilKept(length: number, most: number): number {
    const behind = (length + most) % this.#block;
    return behind < most ? most - behind : most;
  }

  /** The keys of the prefixes of a text that begins with a prompt and may grow. */
  keys(salt: string, prompt: readonly number[] | Int32Array, text: readonly number[]): PrefixKeys {
    return new PrefixKeys((this.#storage?.fingerprint ?? '') + salt, prompt, text, this.#block);
  }

  /** Whether a prompt of `length` tokens has a block before its last token. */
  isLong(length: number): boolean {
    return length > this.#block;
  }

  /** Whether the end of a prompt of `length` tokens is kept; then its last token is read in a pass of its own. */
  keepsEnd(length: number): boolean {
    return this.isLong(length) && this.#most > 1;
  }

  /** A fork of the longest cached prefix with fewer than `length` tokens; null if none is cached in memory. */
  longest(keys: PrefixKeys, length: number): CachedSequence | null {
    this.queries += length;
    const whole = this.#longestWhole(keys, length);
    if (!whole) return null;
    const found = this.#endAfter(whole, keys, length) ?? whole;
    this.#touch(found);
    this.hits += found.sequence.length;
    return found.sequence.fork();
  }

  /** The same if it is longer than `than` tokens, for a prompt that was looked up before. */
  longer(keys: PrefixKeys, length: number, than: number): CachedSequence | null {
    const whole = this.#longestWhole(keys, length);
    const found = whole && (this.#endAfter(whole, keys, length) ?? whole);
    if (!found || found.sequence.length <= than) return null;
    this.#touch(found);
    this.hits += found.sequence.length - than;
    return found.sequence.fork();
  }

  /** The longest node of whole blocks with fewer than `length` tokens. */
  #longestWhole(keys: PrefixKeys, length: number): Node | null {
    for (let end = Math.ceil(length / this.#block - 1) * this.#block; end > 0; end -= this.#block) {
      const node = this.#nodes.get(keys.at(end));
      if (node) return node;
    }
    return null;
  }

  /** The longest end of a prompt after a node's block. */
  #endAfter({ sequence, ends }: Node, keys: PrefixKeys, length: number): Node | null {
    // Files continue whole blocks only.
    if (this.files && sequence.length + this.#block < length) return null;
    for (const end of [...ends.keys()].sort((a, b) => b - a)) {
      const node = end < length ? this.#nodes.get(keys.endKey(end)) : undefined;
      if (node) return node;
    }
    return null;
  }

  /** Extends `sequence`, which holds whole blocks, to fewer than `length` tokens by blocks from files while `isWanted`. */
  async load(keys: PrefixKeys, length: number, sequence: CachedSequence, isWanted: () => boolean): Promise<void> {
    this.#loading += 1;
    try {
      await this.#reader?.load({
        keys,
        length,
        sequence,
        isWanted,
        onFile: (count) => {
          this.hits += count;
          this.fileHits += count;
          this.keep(keys, sequence);
        },
      });
    } finally {
      this.#loading -= 1;
      if (this.#loading === 0) this.#onLoaded();
    }
  }

  /** Reads the first `count` logits after a prompt of `length` tokens from their file; null if they were not stored. */
  async loadLogits(keys: PrefixKeys, length: number, count: number): Promise<Float32Array | null> {
    const { files } = this;
    const logits = new Float32Array(count);
    const bytes = new Uint8Array(logits.buffer);
    const key = keys.promptKey;
    const file = await files?.open(key, (from) => (from === length ? bytes.length : Number.NaN));
    if (!files || !file) return null;
    const isRead = await file.read(bytes, 0);
    const closed = file.close();
    const isSound = isRead && hostChecksum(bytes) === file.sum;
    await closed;
    if (isSound) {
      this.keepLogits(keys, length, logits); // notes the time of use
      return logits;
    }
    if (isRead) await files.discard(key);
    return null;
  }

  /** Lists the folder and looks for a file, which starts the threads that read files, and counts queries from 0 again. */
  async warmUp(): Promise<void> {
    await this.files?.list();
    await this.loadLogits(this.keys('', [], []), 0, 1);
    this.queries = 0;
  }

  /** Has the logits after a prompt of `length` tokens written. */
  keepLogits(keys: PrefixKeys, length: number, logits: Float32Array): void {
    if (!this.files) return;
    // Used up before the pages, without which the logits are worth little.
    const fileTime = Date.now() / 1000 - DEPTH_TIME * (1 + length / this.#block);
    this.#unwritten.add({ key: keys.promptKey, length, logits: logits.slice(), fileTime });
    this.#writer ??= this.#write(this.files);
  }

  /** Keeps the prefix that `sequence` holds if it ends with a block, or anyway if it `isEnd` of a prompt. */
  keep(keys: PrefixKeys, sequence: CachedSequence, isEnd = false): void {
    const { length } = sequence;
    const isWhole = length % this.#block === 0;
    if (!(isWhole || isEnd) || this.#most === 0) return;
    const key = isWhole ? keys.at(length) : keys.endKey(length);
    const known = this.#nodes.get(key);
    if (known) {
      this.#touch(known);
      return;
    }
    const parent = this.#longestWhole(keys, length);
    const blocks = Math.ceil((length - (parent?.sequence.length ?? 0)) / this.#block);
    if (parent) this.#touch(parent);
    if (blocks > this.#most) return;
    while (this.#blocks + blocks > this.#most) if (!this.#evict(parent)) return;
    this.#blocks += blocks;
    if (parent) parent.children += 1;
    if (!isWhole) parent?.ends.set(length, (parent.ends.get(length) ?? 0) + 1);
    const fork = sequence.fork();
    const usedAt = this.#clock;
    const state = { children: 0, ends: new Map(), usedAt, fileTime: 0 };
    const node = { key, parent, blocks, sequence: fork, isEnd: !isWhole, ...state };
    this.#nodes.set(key, node);
    this.#store(node);
  }

  /** Waits until all prefixes are in files, and frees the memory. */
  async close(): Promise<void> {
    while (this.#writer) await this.#writer;
    if (this.#loading > 0)
      await new Promise<void>((resolve) => {
        this.#onLoaded = resolve;
      });
    this.#reader?.free();
    for (const { sequence } of this.#nodes.values()) sequence.free();
    this.#nodes.clear();
  }

  #touch(node: Node): void {
    this.#clock += 1;
    for (let at: Node | null = node; at; at = at.parent) at.usedAt = this.#clock;
    this.#store(node);
  }

  /** Frees the least recently used leaf other than `spared`; false if there is none. */
  #evict(spared: Node | null): boolean {
    let oldest: Node | null = null;
    for (const node of this.#nodes.values())
      if (node.children === 0 && node !== spared && (!oldest || node.usedAt < oldest.usedAt)) oldest = node;
    if (!oldest) return false;
    const { key, sequence, parent, blocks } = oldest;
    const { length } = sequence;
    sequence.free();
    this.#blocks -= blocks;
    if (parent) parent.children -= 1;
    const same = (parent?.ends.get(length) ?? 0) - 1;
    if (same > 0) parent?.ends.set(length, same);
    else parent?.ends.delete(length);
    this.#nodes.delete(key);
    this.#unwritten.delete(oldest);
    return true;
  }

  /** Has the files of a node and its ancestors written, or their time of use updated if that is long ago. */
  #store(node: Node): void {
    if (!this.files) return;
    if (this.#failure) throw this.#failure;
    const chain: Node[] = [];
    for (let at: Node | null = node; at; at = at.parent) if (!at.isEnd) chain.unshift(at);
    if (chain.length === 0) return;
    const now = Date.now() / 1000;
    const isOld = chain[0].fileTime < now - TIME_RESOLUTION;
    for (const [i, one] of chain.entries()) {
      if (!isOld && one.fileTime > 0) continue;
      one.fileTime = i === 0 ? now : chain[i - 1].fileTime - DEPTH_TIME;
      this.#unwritten.add(one);
    }
    this.#writer ??= this.#write(this.files);
  }

  /** Writes in the order of use, so that a block is never in a file without those before it. */
  async #write(files: PrefixFiles): Promise<void> {
    try {
      await setImmediate();
      for (const node of this.#unwritten) {
        await this.#untilPromptsAreRead();
        if (!this.#unwritten.delete(node)) continue; // evicted meanwhile
        if ('logits' in node) await this.#writeLogits(files, node);
        else await this.#writeNode(files, node);
      }
    } catch (error) {
      this.#failure = error; // not of the file system: thrown by the next use of the cache
    } finally {
      this.#writer = null;
    }
  }

  async #untilPromptsAreRead(): Promise<void> {
    const startedAt = performance.now();
    while (this.#storage?.isReading() && performance.now() - startedAt < MAX_WAIT_MS) await setTimeout(LOOK_MS);
  }

  async #writeNode(files: PrefixFiles, { key, sequence, blocks, fileTime }: Node): Promise<void> {
    const from = sequence.length - blocks * this.#block;
    const held = sequence.fork(); // the node may be evicted while it is written
    try {
      const bytes = this.#cache.blockPageBytes(from, held.length);
      await files.write(key, from, bytes, fileTime, (content) => this.#copy(held, from, content));
    } finally {
      held.free();
    }
  }

  #writeLogits(files: PrefixFiles, { key, length, logits, fileTime }: Logits): Promise<void> {
    const bytes = new Uint8Array(logits.buffer, logits.byteOffset, logits.byteLength);
    return files.write(key, length, bytes.length, fileTime, async (content) => {
      content.set(bytes);
      return hostChecksum(bytes);
    });
  }

  /** Copies the pages of a block to the host; returns their checksum. */
  async #copy(sequence: CachedSequence, from: number, into: Uint8Array): Promise<bigint> {
    const { device } = this.#cache;
    const packed = Tensor.empty(device, [into.length / 2], 'bf16');
    try {
      let offset = 0;
      for (const page of joined(this.#cache.blockPages(sequence, from))) {
        device.copy(packed.pointer + BigInt(offset), page.pointer, page.bytes);
        offset += page.bytes;
      }
      const [sum] = checksums(device, [packed]);
      for (let at = 0; at < into.length; at += PIECE) {
        device.download(packed.pointer + BigInt(at), into.subarray(at, at + PIECE));
        await setImmediate();
      }
      return sum;
    } finally {
      packed.free();
    }
  }
}

function hostChecksum(bytes: Uint8Array): bigint {
  return createHash('sha256').update(bytes).digest().readBigUInt64LE();
}
