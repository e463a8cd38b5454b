/** The tokens of a vocabulary as byte strings in a tree, to find those that a grammar allows. */
import { byteString } from '../../bytes.js';
import type { Tokenizer } from '../../data/tokenizer.js';
import { UsageError } from '../../errors.js';

export class TokenTree {
  /** Number of tokens, those without text included. */
  readonly size: number;
  /** Bytes of the longest token. */
  readonly longest: number;
  /** Nodes in depth-first order: its last byte, its depth, and the node after its subtree. Node 0 is the root. */
  readonly byte: Uint8Array;
  readonly depth: Uint16Array;
  readonly skip: Int32Array;
  /** Tokens in the order of their bytes; those of node i are from `first[i]` to before `first[i + 1]`. */
  readonly tokens: Int32Array;
  readonly first: Int32Array;
  /** Bytes of every token; null for tokens without text. */
  readonly #bytes: readonly (string | null)[];
  readonly #roots = new Int32Array(256).fill(-1);

  constructor(bytes: readonly (string | null)[]) {
    this.#bytes = bytes;
    this.size = bytes.length;
    const order = bytes.flatMap((text, token) => (text === null || text === '' ? [] : [token]));
    order.sort((a, b) => (bytes[a]! < bytes[b]! ? -1 : bytes[a]! > bytes[b]! ? 1 : a - b));
    this.tokens = Int32Array.from(order);
    this.longest = order.reduce((most, token) => Math.max(most, bytes[token]!.length), 0);
    const nodes = order.reduce(
      (sum, token, i) => sum + bytes[token]!.length - (i > 0 ? common(bytes[order[i - 1]]!, bytes[token]!) : 0),
      1,
    );
    this.byte = new Uint8Array(nodes);
    this.depth = new Uint16Array(nodes);
    this.skip = new Int32Array(nodes).fill(nodes);
    this.first = new Int32Array(nodes + 1).fill(order.length);
    this.first[0] = 0;
    const path = [0];
    let count = 1;
    for (const [i, token] of order.entries()) {
      const text = bytes[token]!;
      const shared = i > 0 ? common(bytes[order[i - 1]]!, text) : 0;
      while (path.length > shared + 1) this.skip[path.pop()!] = count;
      for (let at = shared; at < text.length; at++) {
        this.byte[count] = text.charCodeAt(at);
        this.depth[count] = at + 1;
        this.first[count] = i;
        if (at === 0) this.#roots[this.byte[count]] = count;
        path.push(count);
        count += 1;
      }
    }
  }

  /** The bytes of a token; null if it has no text. */
  bytes(token: number): string | null {
    return this.#bytes[token] ?? null;
  }

  /** Whether every byte is a token, so that n bytes never take more than n tokens. */
  get hasAllBytes(): boolean {
    // 0xC0, 0xC1 and 0xF5 to 0xFF are in no UTF-8 text, and control characters but tab and line feed in no JSON.
    const isUsed = (byte: number) =>
      byte === 9 || byte === 10 || (byte >= 0x20 && byte < 0xc0) || (byte > 0xc1 && byte < 0xf5);
    return this.#roots.every((node, byte) => !isUsed(byte) || (node >= 0 && this.first[node] < this.#end(node)));
  }

  /** The smallest number of tokens that write `text`; Infinity if none do. */
  fewestTokens(text: string): number {
    const fewest = new Float64Array(text.length + 1).fill(Number.POSITIVE_INFINITY);
    fewest[text.length] = 0;
    for (let from = text.length - 1; from >= 0; from--) {
      let node = this.#roots[text.charCodeAt(from)];
      for (let to = from + 1; node >= 0; to++) {
        if (this.first[node] < this.#end(node)) fewest[from] = Math.min(fewest[from], 1 + fewest[to]);
        node = to < text.length ? this.#child(node, text.charCodeAt(to)) : -1;
      }
    }
    return fewest[0];
  }

  /** End of the tokens of exactly this node. */
  #end(node: number): number {
    return node + 1 < this.byte.length ? this.first[node + 1] : this.tokens.length;
  }

  #child(node: number, byte: number): number {
    for (let child = node + 1; child < this.skip[node]; child = this.skip[child])
      if (this.byte[child] === byte) return child;
    return -1;
  }
}

/** Length of the common beginning. */
function common(a: string, b: string): number {
  let length = 0;
  while (length < a.length && length < b.length && a.charCodeAt(length) === b.charCodeAt(length)) length += 1;
  return length;
}

/** The first `vocabulary` tokens of a tokenizer. Throws if their texts do not simply follow one another. */
export function createTokenTree(tokenizer: Tokenizer, vocabulary: number): TokenTree {
  const { tokenBytes } = tokenizer;
  if (!tokenBytes)
    throw new UsageError(
      `response_format: tokenizer ${tokenizer.name} has no tokens of fixed bytes, which structured output needs`,
    );
  return new TokenTree(
    Array.from({ length: vocabulary }, (_, token) => {
      const bytes = tokenBytes(token);
      return bytes && byteString(bytes);
    }),
  );
}
