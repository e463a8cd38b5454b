/**
 * A launch whose kernel may start while the one before it still runs (programmatic stream serialization): the driver takes it
 * as a struct with a list of attributes, kept here in native memory and filled anew for every launch.
 */
import koffi from 'koffi';
import type { Driver } from './driver.js';

const CONFIG_BYTES = 56;
const ATTRIBUTE_BYTES = 72;
const PROGRAMMATIC_STREAM_SERIALIZATION = 6;
/** Offsets in CUlaunchConfig: six numbers of grid and block first. */
const AT = { shared: 24, stream: 32, attributes: 40, count: 48 } as const;

export class OverlappingLaunch {
  readonly #config = koffi.alloc('uint64_t', CONFIG_BYTES / 8) as bigint;
  readonly #view: DataView;

  constructor(stream: bigint) {
    const attribute = koffi.alloc('uint64_t', ATTRIBUTE_BYTES / 8) as bigint;
    const value = new DataView(koffi.view(attribute, ATTRIBUTE_BYTES));
    for (let i = 0; i < ATTRIBUTE_BYTES; i += 8) value.setBigUint64(i, 0n, true);
    value.setUint32(0, PROGRAMMATIC_STREAM_SERIALIZATION, true);
    value.setUint32(8, 1, true);
    this.#view = new DataView(koffi.view(this.#config, CONFIG_BYTES));
    for (let i = 0; i < CONFIG_BYTES; i += 8) this.#view.setBigUint64(i, 0n, true);
    this.#view.setBigUint64(AT.stream, stream, true);
    this.#view.setBigUint64(AT.attributes, BigInt(koffi.address(attribute)), true);
    this.#view.setUint32(AT.count, 1, true);
  }

  /** Returns the driver's status. `table`: the addresses of the arguments. */
  launch(
    driver: Driver,
    kernel: bigint,
    grid: readonly number[],
    block: number,
    shared: number,
    table: bigint,
  ): number {
    [...grid, block, 1, 1].forEach((size, i) => void this.#view.setUint32(4 * i, size, true));
    this.#view.setUint32(AT.shared, shared, true);
    return driver.launchKernelEx(this.#config, kernel, table, null);
  }
}
