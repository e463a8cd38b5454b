/** Pages of cached keys and values: allocated as a sequence grows, shared by forks, copied on write. */
import type { Device } from '../device/device.js';
import { DTYPE_BYTES, type Dtype, Tensor } from '../tensor/tensor.js';

/** Bytes of a slab on a GPU, where each allocation takes as long as a launch of many kernels. */
const SLAB_BYTES = 16 * 2 ** 20;
/** Numbers; kernels load several at once. */
const ALIGNMENT = 128;

/** A page of cached keys and values. */
export interface Page {
  readonly memory: Tensor;
  /** Sequences that have it in their table. */
  holders: number;
}

/**
 * Allocates the pages of one kind; all have the same size. On a GPU they are parts of slabs, which are freed when no page is
 * in use.
 */
export class PageStore {
  readonly device: Device;
  readonly numbers: number;
  readonly dtype: Dtype;
  readonly #slabPages: number;
  readonly #slabs: Tensor[] = [];
  readonly #unused: Tensor[] = [];
  #pages = 0;

  constructor(device: Device, numbers: number, dtype: Dtype) {
    this.device = device;
    this.numbers = numbers;
    this.dtype = dtype;
    const bytes = numbers * DTYPE_BYTES[dtype];
    this.#slabPages = device.kind === 'cuda' ? Math.max(1, Math.floor(SLAB_BYTES / bytes)) : 1;
  }

  /** Bytes of all pages in use; a shared page counts once. */
  get bytes(): number {
    return this.#pages * this.numbers * DTYPE_BYTES[this.dtype];
  }

  /** A page of zeros with one owner, or of undefined content that the caller overwrites. */
  take(isZeroed = true): Page {
    const memory = this.#unused.pop() ?? this.#allocate();
    this.#pages += 1;
    if (isZeroed) memory.zero();
    return { memory, holders: 1 };
  }

  /** Gives up one share of a page; the last owner frees it. */
  release(page: Page): void {
    page.holders -= 1;
    if (page.holders > 0) return;
    this.#pages -= 1;
    if (this.#slabPages === 1) page.memory.free();
    else this.#unused.push(page.memory);
    if (this.#pages > 0) return;
    for (const slab of this.#slabs.splice(0)) slab.free();
    this.#unused.length = 0;
  }

  /** An unshared page with the same content. */
  copy(page: Page): Page {
    const copy = this.take(false);
    copy.memory.copyFrom(page.memory);
    this.release(page);
    return copy;
  }

  #allocate(): Tensor {
    const count = this.#slabPages;
    if (count === 1) return Tensor.empty(this.device, [this.numbers], this.dtype);
    const stride = Math.ceil(this.numbers / ALIGNMENT) * ALIGNMENT;
    const slab = Tensor.empty(this.device, [count * stride], this.dtype);
    this.#slabs.push(slab);
    const page = (i: number) => slab.rows(i * stride, i * stride + this.numbers);
    for (let i = count - 1; i > 0; i--) this.#unused.push(page(i));
    return page(0);
  }
}

/** The pages of one sequence, in order, and the table of their addresses that kernels read. */
export class PageList {
  readonly #store: PageStore;
  readonly #pages: (Page | null)[];
  #table: Tensor<'address'>;
  /** The pages from the first to the last (exclusive) that the device's table does not have yet. */
  #changed: readonly [first: number, end: number] | null;

  constructor(store: PageStore, pages: readonly (Page | null)[] = []) {
    this.#store = store;
    this.#pages = [...pages];
    for (const page of pages) if (page) page.holders += 1;
    this.#changed = pages.length > 0 ? [0, pages.length] : null;
    this.#table = Tensor.empty(store.device, [Math.max(8, pages.length)], 'address');
  }

  /**
   * Allocates or copies the pages `from` to `to` (exclusive) so that this sequence can write to them. New pages are zeros,
   * unless the caller overwrites all of them.
   */
  writable(from: number, to: number, isZeroed = true): void {
    while (this.#pages.length < to) this.#put(this.#pages.length, null);
    for (let i = from; i < to; i++) {
      const page = this.#pages[i];
      if (page === null) this.#put(i, this.#store.take(isZeroed));
      else if (page.holders > 1) this.#put(i, this.#store.copy(page));
    }
  }

  /** Whether another sequence holds the page too. A shared page must not be written. */
  isShared(index: number): boolean {
    return (this.#pages[index]?.holders ?? 0) > 1;
  }

  /** Memory of the pages `from` to `to` (exclusive), none of which was dropped. */
  memory(from: number, to: number): Tensor[] {
    return this.#pages.slice(from, to).map((page, i) => {
      if (!page) throw new Error(`page ${from + i} was dropped`);
      return page.memory;
    });
  }

  /** Releases the pages before `first`. */
  dropBefore(first: number): void {
    // Pages are dropped in order: the ones before the first null were dropped earlier.
    for (let i = Math.min(first, this.#pages.length) - 1; i >= 0; i--) {
      const page = this.#pages[i];
      if (page === null) break;
      this.#store.release(page);
      this.#put(i, null);
    }
  }

  /** A second list of the same pages; a page is copied when one of them writes to it. */
  fork(): PageList {
    return new PageList(this.#store, this.#pages);
  }

  /** Releases all pages of the list. */
  free(): void {
    for (const page of this.#pages) if (page) this.#store.release(page);
    this.#pages.length = 0;
    this.#table.free();
  }

  /** The address of the table on the device, up to date. */
  tableAddress(): bigint {
    if (this.#changed) this.#upload(this.#changed);
    return this.#table.pointer;
  }

  #put(index: number, page: Page | null): void {
    this.#pages[index] = page;
    const [first, end] = this.#changed ?? [index, index];
    this.#changed = [Math.min(first, index), Math.max(end, index + 1)];
  }

  #upload([first, end]: readonly [number, number]): void {
    if (this.#table.size < this.#pages.length) {
      this.#table.free();
      this.#table = Tensor.empty(this.#store.device, [2 * this.#pages.length], 'address');
      [first, end] = [0, this.#pages.length];
    }
    this.#table.rows(first, end).write(this.#pages.slice(first, end).map((page) => page?.memory.pointer ?? 0n));
    this.#changed = null;
  }
}
