/**
 * Copies from host to GPU on a second stream, while kernels run. The bytes go to a buffer of the queue, from which the
 * device's stream copies them in its own order. The host waits only for the previous copy, which has normally finished.
 */
import koffi from '../koffi.js';
import type { CudaDevice } from './cuda.js';

const STREAM_NON_BLOCKING = 1;
const EVENT_WITHOUT_TIME = 2;

export class CopyQueue {
  readonly #device: CudaDevice;
  readonly #stream: bigint;
  /** Event: the bytes have arrived in the buffer. */
  readonly #landed: bigint;
  /** Event: the device has copied them; the buffer may be overwritten. */
  readonly #taken: bigint;
  readonly #capacity: number;
  /** Pinned, so that the copy is asynchronous. */
  readonly #host: bigint;
  readonly #bytes: Uint8Array;
  readonly #landing: bigint;
  readonly #giveBack: () => void;

  constructor(device: CudaDevice, capacity: number) {
    const { driver, pool } = device;
    this.#device = device;
    this.#capacity = capacity;
    this.#stream = driver.get('cuStreamCreate', STREAM_NON_BLOCKING);
    this.#landed = driver.get('cuEventCreate', EVENT_WITHOUT_TIME);
    this.#taken = driver.get('cuEventCreate', EVENT_WITHOUT_TIME);
    this.#host = driver.get('cuMemAllocHost_v2', capacity);
    this.#bytes = new Uint8Array(koffi.view(this.#host, capacity));
    const block = pool.take(capacity);
    this.#landing = block.address;
    this.#giveBack = () => pool.give(block);
    // Earlier launches may still use this memory.
    driver.call('cuEventRecord', this.#taken, device.stream);
  }

  get capacity(): number {
    return this.#capacity;
  }

  /** Starts to copy these pieces, concatenated. */
  send(pieces: readonly Uint8Array[]): void {
    const { driver } = this.#device;
    const total = pieces.reduce((sum, { byteLength }) => sum + byteLength, 0);
    if (total > this.#capacity) throw new Error(`${total} bytes do not fit into a queue of ${this.#capacity}`);
    driver.call('cuEventSynchronize', this.#landed); // the pinned memory may be overwritten
    let at = 0;
    for (const piece of pieces) {
      this.#bytes.set(piece, at);
      at += piece.byteLength;
    }
    driver.call('cuStreamWaitEvent', this.#stream, this.#taken, 0);
    driver.call('cuMemcpyHtoDAsync_v2', this.#landing, this.#host, total, this.#stream);
    driver.call('cuEventRecord', this.#landed, this.#stream);
  }

  /** Copies the pieces that were sent to these addresses, in the order of the device's stream. */
  take(places: readonly { readonly address: bigint; readonly bytes: number }[]): void {
    const { driver, stream } = this.#device;
    driver.call('cuStreamWaitEvent', stream, this.#landed, 0);
    let from = this.#landing;
    for (const { address, bytes } of places) {
      this.#device.copy(address, from, bytes);
      from += BigInt(bytes);
    }
    driver.call('cuEventRecord', this.#taken, stream);
  }

  /** The device's stream must have been synchronized. */
  free(): void {
    const { driver } = this.#device;
    driver.call('cuStreamSynchronize', this.#stream);
    driver.call('cuMemFreeHost', this.#host);
    for (const event of [this.#landed, this.#taken]) driver.call('cuEventDestroy_v2', event);
    driver.call('cuStreamDestroy_v2', this.#stream);
    this.#giveBack();
  }
}
