/** Names of prefixes of texts: the same tokens after the same salt have the same name, in every process. */
import { createHash } from 'node:crypto';

/** The chain of hashes that names the prefixes of a text. */
export class PrefixName {
  readonly #prompt: Int32Array;
  readonly #text: readonly number[];
  readonly #block: number;
  /** Of the empty prefix, of one block, of two, … as far as they were needed. */
  readonly #keys: string[];

  constructor(start: string, prompt: readonly number[] | Int32Array, text: readonly number[], block: number) {
    this.#prompt = prompt instanceof Int32Array ? prompt : new Int32Array(prompt);
    this.#text = text;
    this.#block = block;
    this.#keys = [createHash('sha256').update(start).digest('hex')];
  }

  /** The name of the prefix of `length` tokens, a multiple of the block. */
  key(length: number): string {
    const count = length / this.#block;
    while (this.#keys.length <= count) {
      const end = this.#keys.length * this.#block;
      this.#keys.push(this.#after(this.#keys.length - 1, end));
    }
    return this.#keys[count];
  }

  /** Whether `length` is one of whole blocks, and both texts begin with the same ones. */
  isSame(other: PrefixName, length: number): boolean {
    return length % this.#block === 0 && this.key(length) === other.key(length);
  }

  /** The length of the prefix of this name, which is one of whole blocks. */
  lengthOf(key: string): number {
    return this.#keys.indexOf(key) * this.#block;
  }

  /** The name of a prefix of any length. Differs from that of a prefix of whole blocks. */
  endKey(length: number): string {
    const whole = Math.floor(length / this.#block);
    this.key(whole * this.#block);
    return `end ${this.#after(whole, length)}`;
  }

  /** The name of what follows the whole prompt. */
  get promptKey(): string {
    return createHash('sha256').update(this.endKey(this.#prompt.length)).digest('hex');
  }

  /** The hash of the tokens from block `count` up to `end`, and of the name of those before. */
  #after(count: number, end: number): string {
    const from = count * this.#block;
    const tokens =
      end <= this.#prompt.length ? this.#prompt.subarray(from, end) : new Int32Array(this.#text.slice(from, end));
    const bytes = new Uint8Array(tokens.buffer, tokens.byteOffset, tokens.byteLength);
    return createHash('sha256').update(this.#keys[count]).update(bytes).digest('hex');
  }
}
