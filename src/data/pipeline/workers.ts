/** The trainer's handle on the worker threads of a pipeline. */

import { MessageChannel, type MessagePort, receiveMessageOnPort, Worker } from 'node:worker_threads';
import { TrefoilError } from '../../errors.js';
import { workerFile } from '../../worker-file.js';
import { failureOf } from './failure.js';
import { type FromWorker, type StreamTask, WORKER_MODULE } from './messages.js';

export class PipelineWorkers {
  readonly #workers: readonly Worker[];
  readonly #ports: readonly MessagePort[];
  readonly #listeners = new Set<() => void>();
  #failure: TrefoilError | undefined;

  private constructor(workers: readonly Worker[], ports: readonly MessagePort[]) {
    this.#workers = workers;
    this.#ports = ports;
    for (const [index, worker] of workers.entries()) {
      // A thread that ends without a message (out of memory) must not look like a slow source.
      worker.on('error', (error) => this.#lost(`a data worker failed: ${error.message}`));
      worker.on('exit', (code) => code !== 0 && this.#lost(`data worker ${index} ended with code ${code}`));
      ports[index].on('message', (message: FromWorker) => this.#receive(message));
      // Neither must keep the process alive.
      worker.unref();
      ports[index].unref();
    }
  }

  static async start(tasks: readonly Omit<StreamTask, 'port'>[]): Promise<PipelineWorkers> {
    const file = await workerFile(WORKER_MODULE);
    const ports: MessagePort[] = [];
    const workers = tasks.map((task) => {
      const { port1, port2 } = new MessageChannel();
      ports.push(port1);
      const workerData: StreamTask = { ...task, port: port2 };
      return new Worker(file, { workerData, transferList: [port2], name: `trefoil-data-${task.worker}` });
    });
    return new PipelineWorkers(workers, ports);
  }

  wake(worker: number): void {
    this.#ports[worker].postMessage('granted');
  }

  /** The error of a failed worker. Also reads messages that wait because this thread has not yielded. */
  failure(): TrefoilError | undefined {
    for (const port of this.#ports) {
      for (let next = receiveMessageOnPort(port); next !== undefined; next = receiveMessageOnPort(port))
        this.#receive(next.message as FromWorker);
    }
    return this.#failure;
  }

  /**
   * Resolves with the next message, after `ms`, or at once if `isPointless` returns true. That is called after the listener
   * is installed, so that no message is missed in between.
   */
  async news(ms: number, isPointless: () => boolean): Promise<void> {
    let finish = (): void => {};
    const arrived = new Promise<void>((resolve) => {
      finish = resolve;
    });
    this.#listeners.add(finish);
    // Unreferenced ports do not keep a waiting process alive; this timer does.
    const timer = setTimeout(finish, ms);
    try {
      if (!isPointless()) await arrived;
    } finally {
      clearTimeout(timer);
      this.#listeners.delete(finish);
    }
  }

  close(): void {
    for (const port of this.#ports) port.close();
    for (const worker of this.#workers) {
      worker.removeAllListeners();
      void worker.terminate();
    }
  }

  #receive(message: FromWorker): void {
    if (message.kind === 'failed') this.#failure ??= failureOf(message);
    for (const listener of this.#listeners) listener();
  }

  #lost(message: string): void {
    // Its last message may still be queued, and has more detail.
    this.failure();
    this.#failure ??= new TrefoilError(message);
    for (const listener of this.#listeners) listener();
  }
}
