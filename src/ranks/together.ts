/** What ranks tell each other beside gradients: a few numbers or lines of text, and every rank goes on knowing the same. */
import type { Collectives, Reduction } from '../device/collectives.js';
import type { Device } from '../device/device.js';
import { Tensor } from '../tensor/tensor.js';

const WORD = 4;

export class Together {
  readonly #device: Device;
  readonly #collectives: Collectives;

  constructor(device: Device, collectives: Collectives) {
    this.#device = device;
    this.#collectives = collectives;
  }

  get rank(): number {
    return this.#collectives.rank;
  }
  get world(): number {
    return this.#collectives.world;
  }
  get isFirst(): boolean {
    return this.rank === 0;
  }

  /** Sums over all ranks, in float64 and in the order of the ranks. */
  sum(values: readonly number[]): number[] {
    return this.#reduce(values, 'sum');
  }

  max(values: readonly number[]): number[] {
    return this.#reduce(values, 'max');
  }

  /** Returns when every rank has come here. */
  wait(): void {
    this.max([0]);
  }

  /** The text of every rank, by rank. */
  gather(text: string): string[] {
    const own = Buffer.from(text);
    const lengths = this.#gatherNumbers(own.length);
    const words = Math.ceil(Math.max(...lengths) / WORD);
    if (words === 0) return lengths.map(() => '');
    const sent = Buffer.alloc(words * WORD);
    sent.set(own);
    return this.#using([words, words * this.world], 'i32', ([from, into]) => {
      from.writeBytes(sent);
      this.#collectives.allGather(span(from), span(into));
      this.#collectives.join();
      const bytes = Buffer.from(into.readBytes());
      return lengths.map((length, rank) => bytes.toString('utf8', rank * words * WORD, rank * words * WORD + length));
    });
  }

  /** The text of one rank; the others' is of no matter. */
  share(text: string, from = 0): string {
    const own = Buffer.from(this.rank === from ? text : '');
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

  /** One rank does it first, the others when it is done: what it leaves in caches and folders they find. */
  async firstThenOthers<Result>(action: () => Result | Promise<Result>, isFirst = this.isFirst): Promise<Result> {
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
    const own = Array.from({ length: this.world }, (_, rank) => (rank === this.rank ? value : 0));
    return this.sum(own);
  }

  #using<Result>(sizes: readonly number[], dtype: 'i32' | 'f64', use: (memory: Tensor[]) => Result): Result {
    const memory = sizes.map((size) => Tensor.empty(this.#device, [size], dtype));
    const result = use(memory);
    // Not freed when `use` throws: a broken exchange may still write there.
    for (const tensor of memory) tensor.free();
    return result;
  }
}

function span(tensor: Tensor) {
  return { address: tensor.pointer, count: tensor.size, dtype: tensor.dtype };
}
