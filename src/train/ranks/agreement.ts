/** Exchanges of ranks besides gradients: a few numbers or lines of text, after which every rank knows the same. */
import type { Collectives, Reduction, Span } from '../../device/collectives.js';
import type { Device } from '../../device/device.js';
import { Tensor } from '../../tensor/tensor.js';

/**
 * Every rank must call the same methods in the same order.
 *
 * @opaque
 */
export interface Agreement {
  /** Sums over all ranks, in float64 and in rank order. */
  sum(values: readonly number[]): number[];
  /** The largest value of all ranks, element by element. */
  max(values: readonly number[]): number[];
  /** Returns when every rank has called it. */
  wait(): void;
  /** The texts of all ranks, in rank order. */
  gather(text: string): string[];
  /** The text of rank `from`; the texts of the others are ignored. */
  share(text: string, from?: number): string;
  /** One rank runs `action` first and the others after it, so that they find what it left in caches and folders. */
  firstThenOthers<Result>(action: () => Result | Promise<Result>, isFirst?: boolean): Promise<Result>;
}

/** The agreement of a run of one process: every rank knows what this one knows. */
export class SingleAgreement implements Agreement {
  sum(values: readonly number[]): number[] {
    return [...values];
  }
  max(values: readonly number[]): number[] {
    return [...values];
  }
  wait(): void {}
  gather(text: string): string[] {
    return [text];
  }
  share(text: string): string {
    return text;
  }
  async firstThenOthers<Result>(action: () => Result | Promise<Result>): Promise<Result> {
    return await action();
  }
}

const WORD = 4;

export class RankAgreement implements Agreement {
  readonly #device: Device;
  readonly #collectives: Collectives;

  constructor(device: Device, collectives: Collectives) {
    this.#device = device;
    this.#collectives = collectives;
  }

  get #rank(): number {
    return this.#collectives.rank;
  }
  get #size(): number {
    return this.#collectives.world;
  }

  sum(values: readonly number[]): number[] {
    return this.#reduce(values, 'sum');
  }

  max(values: readonly number[]): number[] {
    return this.#reduce(values, 'max');
  }

  wait(): void {
    this.max([0]);
  }

  gather(text: string): string[] {
    const own = Buffer.from(text);
    const lengths = this.#gatherNumbers(own.length);
    const words = Math.ceil(Math.max(...lengths) / WORD);
    if (words === 0) return lengths.map(() => '');
    const sent = Buffer.alloc(words * WORD);
    sent.set(own);
    return this.#using([words, words * this.#size], 'i32', ([from, into]) => {
      from.writeBytes(sent);
      this.#collectives.allGather(span(from), span(into));
      this.#collectives.join();
      const bytes = Buffer.from(into.readBytes());
      return lengths.map((length, rank) => bytes.toString('utf8', rank * words * WORD, rank * words * WORD + length));
    });
  }

  share(text: string, from = 0): string {
    const own = Buffer.from(this.#rank === from ? text : '');
    const [length] = this.max([own.length]);
    if (length === 0) return '';
    const words = Math.ceil(length / WORD);
    const sent = Buffer.alloc(words * WORD);
    sent.set(own);
    return this.#using([words], 'i32', ([memory]) => {
      memory.writeBytes(sent);
      this.#collectives.broadcast(span(memory), from);
      this.#collectives.join();
      return Buffer.from(memory.readBytes()).toString('utf8', 0, length);
    });
  }

  async firstThenOthers<Result>(action: () => Result | Promise<Result>, isFirst = this.#rank === 0): Promise<Result> {
    if (!isFirst) this.wait();
    const result = await action();
    if (isFirst) this.wait();
    return result;
  }

  #reduce(values: readonly number[], reduction: Reduction): number[] {
    return this.#using([values.length], 'f64', ([memory]) => {
      memory.write(values);
      this.#collectives.allReduce(span(memory), reduction);
      this.#collectives.join();
      return [...memory.read()];
    });
  }

  #gatherNumbers(value: number): number[] {
    const own = Array.from({ length: this.#size }, (_, rank) => (rank === this.#rank ? value : 0));
    return this.sum(own);
  }

  #using<Result>(sizes: readonly number[], dtype: 'i32' | 'f64', use: (memory: Tensor[]) => Result): Result {
    const memory = sizes.map((size) => Tensor.empty(this.#device, [size], dtype));
    const result = use(memory);
    // Not freed if `use` throws: a broken exchange may still write there.
    for (const tensor of memory) tensor.free();
    return result;
  }
}

/** A tensor as collectives take it. */
export function span(tensor: Tensor): Span {
  return { address: tensor.pointer, count: tensor.size, dtype: tensor.dtype };
}
