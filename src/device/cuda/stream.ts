/** The stream of a device, graphs captured from it, and downloads, which wait for it. */
import koffi from '../koffi.js';
import type { Driver } from './driver.js';

const STREAM_NON_BLOCKING = 1;
/** Memory may be allocated during a capture. */
const CAPTURE_RELAXED = 2;
/** With a wait monitor the host polls: without a pause for SPIN_MS, then every WAIT_MS. */
const SPIN_MS = 0.3;
const WAIT_MS = 0.05;
const STAGING_BYTES = 32 * 2 ** 20;
const NEVER_NOTIFIED = new Int32Array(new SharedArrayBuffer(4));

/** Called while the host waits for the GPU, which may itself wait for other ranks. */
export interface WaitMonitor {
  /** Called repeatedly during a wait. An error that it throws ends the wait. */
  look(waitedMs: number): void;
  /** The wait has ended. */
  resume(): void;
  /** The host did something slow of its own, such as compiling a kernel. */
  busy?(): void;
  /** A graph is about to be launched. */
  replay?(): void;
}

export class DeviceStream {
  readonly driver: Driver;
  readonly handle: bigint;
  waitMonitor: WaitMonitor | null = null;
  #isCapturing = false;

  constructor(driver: Driver) {
    this.driver = driver;
    this.handle = driver.get('cuStreamCreate', STREAM_NON_BLOCKING);
  }

  /** During a capture nothing runs, so nothing can be waited for or measured. */
  get isCapturing(): boolean {
    return this.#isCapturing;
  }

  synchronize(): void {
    const { waitMonitor } = this;
    if (!waitMonitor) {
      this.driver.call('cuStreamSynchronize', this.handle);
      return;
    }
    const started = performance.now();
    while (!this.driver.isDone(this.handle)) {
      const waited = performance.now() - started;
      if (waited < SPIN_MS) continue;
      waitMonitor.look(waited);
      Atomics.wait(NEVER_NOTIFIED, 0, 0, WAIT_MS);
    }
    waitMonitor.resume();
  }

  /** Captures the launches of `work` as a driver graph, which the caller must destroy. */
  capture(work: () => void): bigint {
    this.driver.call('cuStreamBeginCapture_v2', this.handle, CAPTURE_RELAXED);
    this.#isCapturing = true;
    let graph: bigint;
    try {
      work();
    } finally {
      this.#isCapturing = false;
      graph = this.driver.endCapture(this.handle);
    }
    return graph;
  }
}

/** A recorded sequence of launches. */
export class CudaGraph {
  readonly #stream: DeviceStream;
  #executable: bigint | null;

  /** Records the launches of `work` without running them. */
  constructor(stream: DeviceStream, work: () => void) {
    const { driver } = stream;
    const graph = stream.capture(work);
    this.#stream = stream;
    this.#executable = driver.get('cuGraphInstantiateWithFlags', graph, 0n);
    driver.call('cuGraphDestroy', graph);
  }

  replay(): void {
    if (this.#executable === null) throw new Error('a graph was replayed after it was freed');
    const { driver, handle, waitMonitor } = this.#stream;
    waitMonitor?.replay?.();
    driver.call('cuGraphLaunch', this.#executable, handle);
  }

  free(): void {
    if (this.#executable === null) return;
    this.#stream.synchronize();
    this.#stream.driver.call('cuGraphExecDestroy', this.#executable);
    this.#executable = null;
  }
}

/** Downloads through a pinned host buffer, to which the GPU writes at full speed. */
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
