/** Launches of kernels on the device's stream: their arguments in native memory, and the call that fits the shape. */
import koffi from 'koffi';
import { CudaError } from './driver.js';
import { OverlappingLaunch } from './overlapping-launch.js';
import { Floating, type LaunchArgument, type LaunchShape } from './runtime.js';
import type { DeviceStream } from './stream.js';

/** Parameters of a kernel at most. */
const MOST_ARGUMENTS = 64;
/** From here on a kernel may start before the one ahead of it ends. */
const OVERLAP_ARCHITECTURE = 90;

export class Launcher {
  readonly #stream: DeviceStream;
  readonly #mayOverlap: boolean;
  /** The same memory for all: the driver copies arguments before the call returns. */
  readonly #arguments = new ArgumentTable();
  readonly #overlapping: OverlappingLaunch;
  #launches = 0;

  constructor(stream: DeviceStream, architecture: number) {
    this.#stream = stream;
    this.#mayOverlap = architecture >= OVERLAP_ARCHITECTURE;
    this.#overlapping = new OverlappingLaunch(stream.handle);
  }

  /** How many so far, those without blocks not counted. */
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

/** Arguments of a launch: eight bytes each, and the table of their addresses that the driver is given. */
class ArgumentTable {
  readonly table = koffi.alloc('uint64_t', MOST_ARGUMENTS) as bigint;
  readonly #values: DataView;

  constructor() {
    const values = koffi.alloc('uint64_t', MOST_ARGUMENTS) as bigint;
    this.#values = new DataView(koffi.view(values, 8 * MOST_ARGUMENTS));
    const table = new BigUint64Array(koffi.view(this.table, 8 * MOST_ARGUMENTS));
    for (let i = 0; i < MOST_ARGUMENTS; i++) table[i] = values + BigInt(8 * i);
  }

  set(values: readonly LaunchArgument[]): void {
    if (values.length > MOST_ARGUMENTS) throw new Error(`a kernel takes at most ${MOST_ARGUMENTS} arguments`);
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
