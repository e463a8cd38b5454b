/** Batches on the device: token ids, targets, and the layout of the sequences. */
import type { Batch } from '../data/batch.js';
import type { Device } from '../device/device.js';
import { type SparseLayout, sparseLayout } from '../ops/attention/nsa.js';
import { Sequences } from '../ops/common/sequences.js';
import { Tensor } from '../tensor/tensor.js';

/** A batch on the device. */
export interface DeviceBatch {
  readonly ids: Tensor;
  readonly targets: Tensor;
  readonly layout: SparseLayout;
}

interface HeldLayout {
  readonly layout: SparseLayout;
  holders: number;
}

/**
 * Uploads batches. A layout is kept while a batch uses it. The newest is also kept afterwards, because without document
 * masks all batches share one layout.
 */
export class BatchUploader {
  readonly #device: Device;
  readonly #block: { readonly l: number; readonly d: number };
  /** The last one is the newest. */
  #layouts: HeldLayout[] = [];

  constructor(device: Device, block: { readonly l: number; readonly d: number }) {
    this.#device = device;
    this.#block = block;
  }

  /** The tensors are valid until `release`. */
  upload({ inputs, targets, cuSeqlens }: Pick<Batch, 'inputs' | 'targets' | 'cuSeqlens'>): DeviceBatch {
    const layout = this.#layoutOf(cuSeqlens);
    return {
      ids: Tensor.from(this.#device, inputs, [inputs.length], 'i32'),
      targets: Tensor.from(this.#device, targets, [targets.length], 'i32'),
      layout,
    };
  }

  /** Gives the memory of a batch back for the next one. */
  release({ ids, targets, layout }: DeviceBatch): void {
    ids.free();
    targets.free();
    const held = this.#layouts.find((one) => one.layout === layout);
    if (held) held.holders -= 1;
    this.#forgetUnused();
  }

  /** Frees all memory of the uploader. */
  free(): void {
    for (const { layout } of this.#layouts) freeLayout(layout);
    this.#layouts = [];
  }

  #layoutOf(offsets: Int32Array): SparseLayout {
    const isSame = ({ layout }: HeldLayout) =>
      layout.tokens.starts.length === offsets.length && layout.tokens.starts.every((start, i) => start === offsets[i]);
    const held = this.#layouts.find(isSame) ?? {
      layout: sparseLayout(Sequences.fromOffsets(this.#device, offsets), this.#block),
      holders: 0,
    };
    held.holders += 1;
    this.#layouts = [...this.#layouts.filter((one) => one !== held), held];
    this.#forgetUnused();
    return held.layout;
  }

  #forgetUnused(): void {
    const newest = this.#layouts.at(-1);
    const isUnused = (one: HeldLayout) => one.holders === 0 && one !== newest;
    for (const { layout } of this.#layouts.filter(isUnused)) freeLayout(layout);
    this.#layouts = this.#layouts.filter((one) => !isUnused(one));
  }
}

function freeLayout({ tokens, blocks }: SparseLayout): void {
  tokens.free();
  blocks.free();
}
