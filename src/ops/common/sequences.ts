/**
 * Sequences of different lengths, packed one after the other: tokens are flat [total, ...] and `offsets` (cu_seqlens)
 * holds where each sequence begins. A fixed batch is the case of equal lengths. Sequences never see each other.
 */
import type { Device } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import { dispose } from '../../tensor/dispose.js';
import { Tensor } from '../../tensor/tensor.js';

/** Lengths of packed sequences, on the host and on the device. */
export class Sequences implements Disposable {
  #lengths: readonly number[];
  #starts: Int32Array;
  /** The same on the device. */
  readonly offsets: Tensor;
  /** Layouts of blocks, by their size and stride; freed with this one. */
  readonly #blocks = new Map<string, { readonly layout: Sequences; blocksOf(length: number): number }>();

  constructor(device: Device, lengths: readonly number[]) {
    this.#starts = startsOf(lengths);
    this.#lengths = [...lengths];
    this.offsets = Tensor.from(device, this.#starts, [this.#starts.length], 'i32');
  }

  /** Replaces all lengths by as many others, also those of the layouts of blocks. Device memory keeps its place. */
  replace(lengths: readonly number[]): void {
    if (lengths.length !== this.count) throw new Error(`${lengths.length} lengths cannot replace ${this.count}`);
    this.#starts = startsOf(lengths);
    this.#lengths = [...lengths];
    this.offsets.write(this.#starts);
    for (const { layout, blocksOf } of this.#blocks.values()) layout.replace(lengths.map(blocksOf));
  }

  /** Packed sequences from their `count + 1` offsets; the first is 0, the last the number of tokens. */
  static fromOffsets(device: Device, offsets: ArrayLike<number>): Sequences {
    const values = Array.from(offsets);
    const ascending = values.every((value, i) => i === 0 || value >= values[i - 1]);
    if (values.length === 0 || values[0] !== 0 || !ascending)
      throw new UsageError(`cu_seqlens must start with 0 and never fall, not [${values.slice(0, 8).join(', ')}…]`);
    return new Sequences(
      device,
      values.slice(1).map((value, i) => value - values[i]),
    );
  }

  /** Tokens of each sequence. */
  get lengths(): readonly number[] {
    return this.#lengths;
  }
  /** cu_seqlens on the host: count + 1 ascending numbers from 0. */
  get starts(): Int32Array {
    return this.#starts;
  }
  /** Where the offsets are stored. */
  get device(): Device {
    return this.offsets.device;
  }
  /** Number of sequences. */
  get count(): number {
    return this.lengths.length;
  }
  /** Tokens of all sequences together. */
  get total(): number {
    return this.starts[this.lengths.length];
  }
  /** Tokens of the longest sequence. */
  get longest(): number {
    return this.lengths.reduce((most, length) => Math.max(most, length), 0);
  }

  /** The layout of compressed blocks: floor((S-l)/d)+1 per sequence, none when S < l. Made once, freed with this one. */
  compressed({ l, d }: { readonly l: number; readonly d: number }): Sequences {
    return this.#layout(`${l} every ${d}`, (length) => compressedCount(length, l, d));
  }

  /** The layout of blocks of `size` tokens, of which a sequence's last may be shorter. Made once, freed with this one. */
  inBlocks(size: number): Sequences {
    return this.#layout(`${size}`, (length) => Math.ceil(length / size));
  }

  #layout(key: string, blocksOf: (length: number) => number): Sequences {
    let blocks = this.#blocks.get(key);
    if (!blocks) {
      blocks = { layout: new Sequences(this.device, this.lengths.map(blocksOf)), blocksOf };
      this.#blocks.set(key, blocks);
    }
    return blocks.layout;
  }

  /** `free`, for `using`. */
  [dispose](): void {
    if (!this.offsets.storage.isFreed) this.free();
  }

  /** Frees the offsets on the device, and the layouts of blocks. */
  free(): void {
    this.offsets.free();
    for (const { layout } of this.#blocks.values()) layout.free();
    this.#blocks.clear();
  }
}

/** cu_seqlens of sequences of these lengths. */
function startsOf(lengths: readonly number[]): Int32Array {
  for (const length of lengths)
    if (!Number.isSafeInteger(length) || length < 0)
      throw new UsageError(`a sequence length must be a whole number from 0, not ${length}`);
  const starts = new Int32Array(lengths.length + 1);
  lengths.forEach((length, i) => {
    const next = starts[i] + length;
    if (next > 2 ** 31 - 1) throw new UsageError(`a batch holds at most 2^31 - 1 tokens, not ${next}`);
    starts[i + 1] = next;
  });
  return starts;
}

/** How many compressed blocks the first `length` tokens fill. */
export function compressedCount(length: number, block: number, stride: number): number {
  return length < block ? 0 : Math.floor((length - block) / stride) + 1;
}
