/** Kernel launches on the device's stream, with their arguments in native memory. */
import koffi from '../koffi.js';
import { CudaError, type Driver } from './driver.js';
import { Floating, type LaunchArgument, type LaunchShape } from './runtime.js';
import type { DeviceStream } from './stream.js';

/** Maximum number of kernel parameters. */
const MAX_ARGUMENTS = 64;
/** First architecture on which a kernel may start before the previous one ends. */
const OVERLAP_ARCHITECTURE = 90;

const CONFIG_BYTES = 56;
const ATTRIBUTE_BYTES = 72;
const PROGRAMMATIC_STREAM_SERIALIZATION = 6;
/** Offsets in CUlaunchConfig, after the six sizes of grid and block. */
const AT = { shared: 24, stream: 32, attributes: 40, count: 48 } as const;

export class Launcher {
  readonly #stream: DeviceStream;
  readonly #mayOverlap: boolean;
  /** Shared by all launches: the driver copies arguments before the call returns. */
  readonly #arguments = new ArgumentTable();
  readonly #overlapping: OverlappingLaunch;
  #launches = 0;

  constructor(stream: DeviceStream, architecture: number) {
    this.#stream = stream;
    this.#mayOverlap = architecture >= OVERLAP_ARCHITECTURE;
    this.#overlapping = new OverlappingLaunch(stream.handle);
  }

  /** Number of launches, without those of empty grids. */
  get launches(): number {
    return this.#launches;
  }

  launch(kernel: bigint, shape: LaunchShape, values: readonly LaunchArgument[]): void {
    const { grid, block, shared = 0 } = shape;
    const [x, y = 1, z = 1] = typeof grid === 'number' ? [grid] : grid;
    if (x === 0 || y === 0 || z === 0) return;
    this.#arguments.set(values);
    this.#launches += 1;
    const { driver, handle } = this.#stream;
    const { table } = this.#arguments;
    const overlaps = shape.overlap === true && this.#mayOverlap;
    const status = overlaps
      ? this.#overlapping.launch(driver, kernel, [x, y, z], block, shared, table)
      : driver.launchKernel(kernel, x, y, z, block, 1, 1, shared, handle, table, null);
    if (status !== 0)
      throw new CudaError(
        `CUDA: a launch of ${x}x${y}x${z} blocks of ${block} threads with ${shared} bytes of shared memory failed: ` +
          driver.describe(status),
        status,
      );
  }
}

/** Arguments of a launch, eight bytes each, and the table of their addresses for the driver. */
class ArgumentTable {
  readonly table = koffi.alloc('uint64_t', MAX_ARGUMENTS) as bigint;
  readonly #values: DataView;

  constructor() {
    const values = koffi.alloc('uint64_t', MAX_ARGUMENTS) as bigint;
    this.#values = new DataView(koffi.view(values, 8 * MAX_ARGUMENTS));
    const table = new BigUint64Array(koffi.view(this.table, 8 * MAX_ARGUMENTS));
    for (let i = 0; i < MAX_ARGUMENTS; i++) table[i] = values + BigInt(8 * i);
  }

  set(values: readonly LaunchArgument[]): void {
    if (values.length > MAX_ARGUMENTS) throw new Error(`a kernel takes at most ${MAX_ARGUMENTS} arguments`);
    const view = this.#values;
    for (let i = 0; i < values.length; i++) {
      const value = values[i];
      const at = 8 * i;
      if (typeof value === 'number') view.setBigInt64(at, BigInt(value), true);
      else if (typeof value === 'bigint') view.setBigUint64(at, value, true);
      else if (value === null) view.setBigUint64(at, 0n, true);
      else if (!(value instanceof Floating)) view.setBigUint64(at, value.pointer, true);
      else if (value.double) view.setFloat64(at, value.value, true);
      else view.setFloat32(at, value.value, true);
    }
  }
}

/**
 * A launch whose kernel may start while the previous one still runs (programmatic stream serialization). The driver takes it
 * as a struct with a list of attributes, which is kept in native memory and filled for every launch.
 */
class OverlappingLaunch {
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

  /** Returns the driver's status. `table`: addresses of the arguments. */
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
