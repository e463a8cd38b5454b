/** The code of one CUDA module on the GPU: kernels and constants by name. */
import koffi from '../koffi.js';
import { CudaError, type Driver } from './driver.js';
import type { CudaCode, LaunchArgument, LaunchShape } from './runtime.js';

/** More dynamic shared memory than this must be enabled per kernel. */
const FREE_SHARED = 48 * 1024;

type Launch = (name: string, kernel: bigint, shape: LaunchShape, values: readonly LaunchArgument[]) => void;

/** A module loaded on the GPU, with its functions looked up once by name. */
export class LoadedCode implements CudaCode {
  readonly #driver: Driver;
  readonly #module: bigint;
  readonly #path: string;
  readonly #launch: Launch;
  readonly #kernels = new Map<string, { readonly address: bigint; shared: number }>();
  readonly #constants = new Map<string, number>();

  constructor(driver: Driver, cubin: Uint8Array, path: string, launch: Launch) {
    this.#driver = driver;
    this.#module = driver.get('cuModuleLoadData', cubin);
    this.#path = path;
    this.#launch = launch;
  }

  launch(name: string, shape: LaunchShape, ...values: LaunchArgument[]): void {
    let kernel = this.#kernels.get(name);
    if (!kernel) {
      kernel = { address: this.#find(name), shared: FREE_SHARED };
      this.#kernels.set(name, kernel);
    }
    const { shared = 0 } = shape;
    if (shared > kernel.shared) {
      this.#driver.allowShared(kernel.address, shared);
      kernel.shared = shared;
    }
    try {
      this.#launch(name, kernel.address, shape, values);
    } catch (error) {
      if (error instanceof CudaError) throw new CudaError(`${name} (${this.#path}): ${error.message}`, error.status);
      throw error;
    }
  }

  constant(name: string): number {
    let value = this.#constants.get(name);
    if (value === undefined) {
      const memory = koffi.alloc('int', 1);
      const at = this.#driver.global(this.#module, name);
      this.#driver.call('cuMemcpyDtoHAsync_v2', memory, at, 4, null);
      this.#driver.call('cuStreamSynchronize', null);
      value = new Int32Array(koffi.view(memory, 4))[0];
      koffi.free(memory);
      this.#constants.set(name, value);
    }
    return value;
  }

  #find(name: string): bigint {
    try {
      return this.#driver.get('cuModuleGetFunction', this.#module, name);
    } catch (error) {
      throw new Error(`${this.#path} has no kernel ${name}`, { cause: error });
    }
  }
}
