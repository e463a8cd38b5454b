/**
 * The one stream that a device's work goes to, in the order of the calls. Here the host waits for it, and here what is
 * launched can be captured instead of run.
 */
import type { Driver } from './driver.js';

const STREAM_NON_BLOCKING = 1;
/** Memory may be taken while capturing: a block that is new then is as good as an old one. */
const CAPTURE_RELAXED = 2;
/** With a lookout: how long the host asks without a pause, and then sleeps between two questions. */
const SPIN_MS = 0.3;
const WAIT_MS = 0.05;
const NOBODY = new Int32Array(new SharedArrayBuffer(4));

/** Somebody with a reason to end a wait: the GPU may wait for other ranks. */
export interface Lookout {
  /** Called again and again; what it throws ends the wait. */
  look(waitedMs: number): void;
  /** The wait is over. */
  resume(): void;
  /** The host was busy with something of its own, which takes its time. */
  busy?(): void;
  /** A graph begins, and with it whatever was recorded. */
  replay?(): void;
}

export class DeviceStream {
  readonly driver: Driver;
  readonly handle: bigint;
  /** Looks about while the host waits. */
  lookout: Lookout | null = null;
  #isCapturing = false;

  constructor(driver: Driver) {
    this.driver = driver;
    this.handle = driver.get('cuStreamCreate', STREAM_NON_BLOCKING);
  }

  /** While it is, nothing runs: there is nothing to wait for, and nothing to measure. */
  get isCapturing(): boolean {
    return this.#isCapturing;
  }

  synchronize(): void {
    const { lookout } = this;
    if (!lookout) {
      this.driver.call('cuStreamSynchronize', this.handle);
      return;
    }
    const started = performance.now();
    while (!this.driver.isDone(this.handle)) {
      const waited = performance.now() - started;
      if (waited < SPIN_MS) continue;
      lookout.look(waited);
      Atomics.wait(NOBODY, 0, 0, WAIT_MS);
    }
    lookout.resume();
  }

  /** What `work` launches, as the driver's graph, which the caller destroys. */
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
