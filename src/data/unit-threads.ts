/** Worker threads that share the units of a corpus: each takes the next one by a shared counter, until none is left. */

import { Worker } from 'node:worker_threads';
import { TrefoilError } from '../errors.js';
import { workerFile } from '../worker-file.js';
import { type Failure, failureOf } from './pipeline/failure.js';

/** Every thread gets this besides data of its own. */
export interface SharedUnits {
  readonly units: readonly number[];
  /** How many of `units` the threads have taken: an int32. */
  readonly taken: SharedArrayBuffer;
}

/** The next unit for a thread; undefined when all are taken. */
export function takeUnit({ units, taken }: SharedUnits): number | undefined {
  return units[Atomics.add(new Int32Array(taken), 0, 1)];
}

export interface UnitThreads<Data, Message> {
  /** The program: the URL of a compiled module. */
  readonly module: URL;
  readonly name: string;
  readonly units: readonly number[];
  readonly count: number;
  readonly data: Data;
  readonly onMessage: (message: Message) => void;
}

/** Runs the threads to their end. The first failure of one ends all. */
export async function runUnitThreads<Data extends object, Message>(threads: UnitThreads<Data, Message>): Promise<void> {
  const { module, name, units, count, data, onMessage } = threads;
  const file = await workerFile(module);
  const taken = new SharedArrayBuffer(Int32Array.BYTES_PER_ELEMENT);
  const workerData: Data & SharedUnits = { ...data, units, taken };
  const workers: Worker[] = [];
  const run = (): Promise<void> =>
    new Promise((resolve, reject) => {
      const worker = new Worker(file, { workerData, name });
      workers.push(worker);
      worker.on('error', (error) => reject(new TrefoilError(`a worker failed: ${error.message}`)));
      worker.on('exit', (code) =>
        code === 0 ? resolve() : reject(new TrefoilError(`a worker ended with code ${code}`)),
      );
      worker.on('message', (message: Message | Failure) => {
        try {
          if ((message as Failure).kind === 'failed') throw failureOf(message as Failure);
          onMessage(message as Message);
        } catch (error) {
          reject(error);
        }
      });
    });
  try {
    await Promise.all(Array.from({ length: Math.min(count, units.length) }, run));
  } finally {
    await Promise.all(workers.map((worker) => worker.terminate()));
  }
}
