/** Batches on the device: token ids, targets, and where the sequences lie. */
import type { Batch } from '../data/batch.js';
import type { Device } from '../device/device.js';
import { type SparseLayout, sparseLayout } from '../ops/nsa.js';
import { Sequences } from '../ops/sequences.js';
import { Tensor } from '../tensor/tensor.js';

export interface DeviceBatch {
  readonly ids: Tensor;
  readonly targets: Tensor;
  readonly layout: SparseLayout;
}

/** Uploads batches. The layout is kept while the lengths stay the same, which is always the case without document masks. */
export class BatchUploader {
  readonly #device: Device;
  readonly #block: { readonly l: number; readonly d: number };
  #layout: SparseLayout | null = null;

  constructor(device: Device, block: { readonly l: number; readonly d: number }) {
    this.#device = device;
    this.#block = block;
  }

  /** The tensors are valid until the next call of `release`. */
  upload({ inputs, targets, cuSeqlens }: Pick<Batch, 'inputs' | 'targets' | 'cuSeqlens'>): DeviceBatch {
    const layout = this.#layoutOf(cuSeqlens);
    return {
      ids: Tensor.from(this.#device, inputs, [inputs.length], 'i32'),
      targets: Tensor.from(this.#device, targets, [targets.length], 'i32'),
      layout,
    };
  }

  release({ ids, targets }: DeviceBatch): void {
    ids.free();
    targets.free();
  }

  #layoutOf(offsets: Int32Array): SparseLayout {
    const held = this.#layout;
    const same =
      held?.tokens.starts.length === offsets.length && held.tokens.starts.every((start, i) => start === offsets[i]);
    if (held && same) return held;
    this.free();
    this.#layout = sparseLayout(Sequences.fromOffsets(this.#device, offsets), this.#block);
    return this.#layout;
  }

  free(): void {
    this.#layout?.tokens.free();
    this.#layout?.blocks.free();
    this.#layout = null;
  }
}
