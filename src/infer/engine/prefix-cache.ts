/**
 * Prefixes of earlier requests, to be continued without reading them again.
 *
 * A node holds a fork of a sequence at a multiple of `block` tokens. Forks share pages, so a node costs the pages that its
 * own block added: keys of the selected and the compressed branch, the window, and the raw rows at the end of the block.
 * Nodes form a tree, named by a hash over the salt and all tokens from the start. Only leaves are evicted, the least
 * recently used first, so that the cost of a node stays the cost of one block.
 */
import { createHash } from 'node:crypto';
import type { CachedSequence, DecodeCache } from '../../model/cache.js';

interface Node {
  readonly parent: Node | null;
  readonly sequence: CachedSequence;
  children: number;
  usedAt: number;
}

/** Tokens of a block: a multiple of the page sizes, so that a node shares whole pages, and at least `tile`. */
export function prefixBlock(cache: DecodeCache, tile: number): number {
  const unit = cache.pageTokens;
  return Math.ceil(tile / unit) * unit;
}

export class PrefixCache {
  /** Tokens looked up, and tokens found. */
  queries = 0;
  hits = 0;
  readonly #block: number;
  readonly #most: number;
  readonly #nodes = new Map<string, Node>();
  #clock = 0;

  constructor(cache: DecodeCache, block: number, bytes: number) {
    this.#block = block;
    this.#most = Math.floor(bytes / cache.blockBytes(block));
  }

  /** Tokens from `length` to the end of its block: a pass ends there, so that the prefix can be kept. */
  untilBlock(length: number): number {
    return this.#block - (length % this.#block);
  }

  /** A fork of the longest known prefix of `tokens`, shorter than all of them; null if there is none. */
  longest(salt: string, tokens: readonly number[]): CachedSequence | null {
    this.queries += tokens.length;
    let found: Node | null = null;
    const name = new PrefixName(salt, this.#block);
    for (let end = this.#block; end < tokens.length; end += this.#block) {
      const node = this.#nodes.get(name.extend(tokens, end));
      if (!node) break;
      found = node;
    }
    if (!found) return null;
    this.#touch(found);
    this.hits += found.sequence.length;
    return found.sequence.fork();
  }

  /** Keeps the prefix that `sequence` holds, if it ends with a block. `tokens`: at least those it has read. */
  keep(salt: string, tokens: readonly number[], sequence: CachedSequence): void {
    const { length } = sequence;
    if (length % this.#block !== 0 || this.#most === 0) return;
    const name = new PrefixName(salt, this.#block);
    let [parent, key]: [Node | null, string] = [null, ''];
    for (let end = this.#block; end <= length; end += this.#block) {
      key = name.extend(tokens, end);
      const node = this.#nodes.get(key);
      if (end === length) break;
      if (!node) return; // an evicted ancestor: its pages would be charged to this node
      parent = node;
    }
    const known = this.#nodes.get(key);
    if (known) {
      this.#touch(known);
      return;
    }
    if (parent) this.#touch(parent);
    if (this.#nodes.size >= this.#most && !this.#evict(parent)) return;
    if (parent) parent.children += 1;
    this.#nodes.set(key, { parent, sequence: sequence.fork(), children: 0, usedAt: this.#clock });
  }

  free(): void {
    for (const { sequence } of this.#nodes.values()) sequence.free();
    this.#nodes.clear();
  }

  #touch(node: Node): void {
    this.#clock += 1;
    for (let at: Node | null = node; at; at = at.parent) at.usedAt = this.#clock;
  }

  /** Frees the least recently used leaf other than `spared`; false if there is none. */
  #evict(spared: Node | null): boolean {
    let oldest: [string, Node] | null = null;
    for (const entry of this.#nodes) {
      const [, node] = entry;
      if (node.children === 0 && node !== spared && (!oldest || node.usedAt < oldest[1].usedAt)) oldest = entry;
    }
    if (!oldest) return false;
    const [key, { sequence, parent }] = oldest;
    sequence.free();
    if (parent) parent.children -= 1;
    this.#nodes.delete(key);
    return true;
  }
}

/** The chain of hashes that names the prefixes of a text. */
class PrefixName {
  readonly #block: number;
  #hash: string;

  constructor(salt: string, block: number) {
    this.#block = block;
    this.#hash = createHash('sha256').update(salt).digest('hex');
  }

  /** The name of the prefix of `end` tokens; `end` grows by one block from call to call. */
  extend(tokens: readonly number[], end: number): string {
    const block = Int32Array.from(tokens.slice(end - this.#block, end));
    this.#hash = createHash('sha256').update(this.#hash).update(new Uint8Array(block.buffer)).digest('hex');
    return this.#hash;
  }
}
