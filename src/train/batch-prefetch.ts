/** Batches of the next step, copied to the GPU while it computes this one. */

import type { Batch } from '../data/batch.js';
import { CopyQueue } from '../device/cuda/copy-queue.js';
import type { CudaDevice } from '../device/cuda/cuda.js';
import { bytesOf, type Tensor } from '../tensor/tensor.js';
import type { DeviceBatch } from './device-batch.js';

export class BatchPrefetch {
  readonly #device: CudaDevice;
  #queue: CopyQueue | null = null;
  /** The batches that the queue holds. */
  #sent: readonly Batch[] | null = null;

  constructor(device: CudaDevice) {
    this.#device = device;
  }

  /** Starts to copy the batches. */
  send(batches: readonly Batch[]): void {
    const pieces = batches.flatMap(({ inputs, targets }) => [inputs, targets].map(bytesOf));
    const total = pieces.reduce((sum, { byteLength }) => sum + byteLength, 0);
    if (this.#queue === null || this.#queue.capacity < total) {
      this.free();
      this.#queue = new CopyQueue(this.#device, total);
    }
    this.#queue.send(pieces);
    this.#sent = batches;
  }

  /** Forgets what was sent. */
  drop(): void {
    this.#sent = null;
  }

  /**
   * Moves `batches` to where the step reads them; false, without doing anything, if other batches were sent. A loader's
   * `next` returns the very batches that its `lookAhead` has shown, so a batch is known by being the same object.
   */
  take(batches: readonly Batch[], into: readonly DeviceBatch[]): boolean {
    const sent = this.#sent;
    if (sent?.length !== batches.length || !batches.every((batch, i) => batch === sent[i])) return false;
    this.#queue!.take(into.flatMap(({ ids, targets }) => [ids, targets].map(placeOf)));
    this.#sent = null;
    return true;
  }

  free(): void {
    if (this.#queue) this.#device.synchronize();
    this.#queue?.free();
    this.#queue = null;
    this.#sent = null;
  }
}

function placeOf({ pointer, bytes }: Tensor): { address: bigint; bytes: number } {
  return { address: pointer, bytes };
}
