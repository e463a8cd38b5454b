/** Batches of tokens on the device, with their sequences. */
import type { Batch } from '../data/batch.js';
import type { Device } from '../device/device.js';
import { Sequences } from '../ops/common/sequences.js';
import { Tensor } from '../tensor/tensor.js';

/** A batch on the device. */
export interface DeviceBatch {
  readonly ids: Tensor;
  readonly targets: Tensor;
  readonly sequences: Sequences;
}

interface HeldSequences {
  readonly sequences: Sequences;
  holders: number;
}

/**
 * Uploads batches. Sequences are kept while a batch uses them. The newest are also kept afterwards, because without
 * document masks all batches have the same.
 *
 * @opaque
 */
export class BatchUploader {
  readonly #device: Device;
  readonly #block: { readonly l: number; readonly d: number };
  /** The last one is the newest. */
  #held: HeldSequences[] = [];

  constructor(device: Device, block: { readonly l: number; readonly d: number }) {
    this.#device = device;
    this.#block = block;
  }

  /** The tensors are valid until `release`. */
  upload({ inputs, targets, cuSeqlens }: Pick<Batch, 'inputs' | 'targets' | 'cuSeqlens'>): DeviceBatch {
    const sequences = this.#sequencesOf(cuSeqlens);
    return {
      ids: Tensor.from(this.#device, inputs, [inputs.length], 'i32'),
      targets: Tensor.from(this.#device, targets, [targets.length], 'i32'),
      sequences,
    };
  }

  /** Gives the memory of a batch back for the next one. */
  release({ ids, targets, sequences }: DeviceBatch): void {
    ids.free();
    targets.free();
    const held = this.#held.find((one) => one.sequences === sequences);
    if (held) held.holders -= 1;
    this.#forgetUnused();
  }

  /** Frees all memory of the uploader. */
  free(): void {
    for (const { sequences } of this.#held) sequences.free();
    this.#held = [];
  }

  #sequencesOf(offsets: Int32Array): Sequences {
    const isSame = ({ sequences: { starts } }: HeldSequences) =>
      starts.length === offsets.length && starts.every((start, i) => start === offsets[i]);
    const held = this.#held.find(isSame) ?? { sequences: this.#create(offsets), holders: 0 };
    held.holders += 1;
    this.#held = [...this.#held.filter((one) => one !== held), held];
    this.#forgetUnused();
    return held.sequences;
  }

  #create(offsets: Int32Array): Sequences {
    const sequences = Sequences.fromOffsets(this.#device, offsets);
    sequences.compressed(this.#block); // now, because a graph that records the forward pass must find it in place
    return sequences;
  }

  #forgetUnused(): void {
    const newest = this.#held.at(-1);
    const isUnused = (one: HeldSequences) => one.holders === 0 && one !== newest;
    for (const { sequences } of this.#held.filter(isUnused)) sequences.free();
    this.#held = this.#held.filter((one) => !isUnused(one));
  }
}
