import koffi from 'koffi';
import type { DeviceStream } from './stream.js';

const STAGING_BYTES = 32 * 2 ** 20;

/** Pinned host memory that downloads pass through: the GPU writes there at full speed. */
export class Staging {
  readonly #stream: DeviceStream;
  readonly #address: bigint;
  readonly #bytes: Uint8Array;

  constructor(stream: DeviceStream) {
    this.#stream = stream;
    this.#address = stream.driver.get('cuMemAllocHost_v2', STAGING_BYTES);
    this.#bytes = new Uint8Array(koffi.view(this.#address, STAGING_BYTES));
  }

  download(address: bigint, into: Uint8Array): void {
    const { driver, handle } = this.#stream;
    for (let from = 0; from < into.byteLength; from += STAGING_BYTES) {
      const count = Math.min(STAGING_BYTES, into.byteLength - from);
      driver.call('cuMemcpyDtoHAsync_v2', this.#address, address + BigInt(from), count, handle);
      this.#stream.synchronize();
      into.set(this.#bytes.subarray(0, count), from);
    }
  }
}
