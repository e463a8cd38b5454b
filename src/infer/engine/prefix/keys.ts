/**
 * Keys of prefixes of texts: the same tokens after the same salt have the same key, in every process that computes the same
 * pages for them.
 */
import { createHash } from 'node:crypto';
import type { DecodeCache } from '../../../model/cache.js';
import type { LanguageModel } from '../../../model/language-model.js';
import { checksums } from '../../../ops/checksum/op.js';
import { PackedMatrix } from '../../../ops/linear/packed.js';
import { trefoilVersion } from '../../../run/version.js';

/** The keys of the prefixes of one text: a chain of hashes. */
export class PrefixKeys {
  readonly #prompt: Int32Array;
  readonly #text: readonly number[];
  readonly #block: number;
  /** Keys of the empty prefix, of one block, of two, … as far as they were needed. */
  readonly #keys: string[];

  constructor(start: string, prompt: readonly number[] | Int32Array, text: readonly number[], block: number) {
    this.#prompt = prompt instanceof Int32Array ? prompt : new Int32Array(prompt);
    this.#text = text;
    this.#block = block;
    this.#keys = [createHash('sha256').update(start).digest('hex')];
  }

  /** The key of the prefix of `length` tokens, a multiple of the block. */
  at(length: number): string {
    const count = length / this.#block;
    while (this.#keys.length <= count) {
      const end = this.#keys.length * this.#block;
      this.#keys.push(this.#after(this.#keys.length - 1, end));
    }
    return this.#keys[count];
  }

  /** Whether `length` is one of whole blocks, and both texts begin with the same ones. */
  isSame(other: PrefixKeys, length: number): boolean {
    return length % this.#block === 0 && this.at(length) === other.at(length);
  }

  /** The length of the prefix of whole blocks that has this key. */
  lengthOf(key: string): number {
    return this.#keys.indexOf(key) * this.#block;
  }

  /** The key of a prefix of any length. Differs from that of a prefix of whole blocks. */
  endKey(length: number): string {
    const whole = Math.floor(length / this.#block);
    this.at(whole * this.#block);
    return `end ${this.#after(whole, length)}`;
  }

  /** The key of the logits after the whole prompt. */
  get promptKey(): string {
    return createHash('sha256').update(this.endKey(this.#prompt.length)).digest('hex');
  }

  /** The hash of the tokens from block `count` up to `end`, and of the key of those before. */
  #after(count: number, end: number): string {
    const from = count * this.#block;
    const tokens =
      end <= this.#prompt.length ? this.#prompt.subarray(from, end) : new Int32Array(this.#text.slice(from, end));
    const bytes = new Uint8Array(tokens.buffer, tokens.byteOffset, tokens.byteLength);
    return createHash('sha256').update(this.#keys[count]).update(bytes).digest('hex');
  }
}

/**
 * Weights, shape, page layout, device and version of a model, as a hex digest. `settings`: anything else that the pages
 * depend on. The device reads all weights once.
 */
export function modelFingerprint(model: LanguageModel, cache: DecodeCache, settings: unknown): string {
  const { device, shape, parameters } = model;
  // On the CPU results are the same on every processor with the same vector width, which the layout shows.
  const place = device.kind === 'cpu' ? 'cpu' : `${device.kind} ${device.name}`;
  const hash = createHash('sha256');
  hash.update(JSON.stringify([trefoilVersion(), place, shape, cache.layout, settings]));
  const sums = checksums(
    device,
    parameters.map(({ value }) => (value instanceof PackedMatrix ? value.memory : value)),
  );
  parameters.forEach(({ name, value }, i) => {
    const type = value instanceof PackedMatrix ? value.type : value.dtype;
    hash.update(JSON.stringify([name, type, value.shape, String(sums[i])]));
  });
  return hash.digest('hex');
}
