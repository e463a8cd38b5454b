import type { DeviceStream } from './stream.js';

/** A recorded sequence of launches. */
export class CudaGraph {
  readonly #stream: DeviceStream;
  #executable: bigint | null;

  /** Records what `work` launches, without running it. */
  constructor(stream: DeviceStream, work: () => void) {
    const { driver } = stream;
    const graph = stream.capture(work);
    this.#stream = stream;
    this.#executable = driver.get('cuGraphInstantiateWithFlags', graph, 0n);
    driver.call('cuGraphDestroy', graph);
  }

  replay(): void {
    if (this.#executable === null) throw new Error('a graph was replayed after it was freed');
    const { driver, handle, lookout } = this.#stream;
    lookout?.replay?.();
    driver.call('cuGraphLaunch', this.#executable, handle);
  }

  free(): void {
    if (this.#executable === null) return;
    this.#stream.synchronize();
    this.#stream.driver.call('cuGraphExecDestroy', this.#executable);
    this.#executable = null;
  }
}
