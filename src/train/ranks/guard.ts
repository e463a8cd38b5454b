/**
 * A second thread that watches the training thread. While a GPU waits for a rank that is gone, CUDA and NCCL calls may not
 * return, and the thread that made them cannot check anything. The guard then names the lost rank and kills the process,
 * which is all that can be done from another thread.
 *
 * The guards of all ranks hold a connection to the guard of rank 0, their lifeline: when a process exits, on any machine,
 * its connection closes and all ranks are notified. NCCL notifies only neighbours, on some networks late. A stopped process
 * keeps its connections; it is recognised by missing heartbeats (pulse.ts).
 */
import { dirname } from 'node:path';
import { Worker } from 'node:worker_threads';
import type { Guard } from '../../device/cuda/nccl.js';
import type { RunPaths } from '../../run/paths.js';
import { workerFile } from '../../worker-file.js';
import {
  FOLDER_AT,
  FOLDER_BYTES,
  type GuardOptions,
  type GuardTask,
  type Lifeline,
  PHASES,
  rankIn,
  WORDS,
} from './guard-shared.js';

const QUIET_MS = 5000;
const LEAVE_MS = 15_000;

export class RankGuard implements Guard {
  readonly #words: Int32Array;
  readonly #folder: Uint8Array;

  /** Where rank 0 listens, for the other ranks' `hold`; null on the others, and if no port is free. */
  readonly lifeline: Lifeline | null;
  readonly #worker: Worker;

  private constructor(shared: SharedArrayBuffer, worker: Worker, lifeline: Lifeline | null) {
    this.#worker = worker;
    this.lifeline = lifeline;
    this.#words = new Int32Array(shared, 0, WORDS.count);
    this.#folder = new Uint8Array(shared, FOLDER_AT);
  }

  static async start(options: GuardOptions): Promise<RankGuard> {
    const shared = new SharedArrayBuffer(FOLDER_AT + FOLDER_BYTES);
    const workerData: GuardTask = {
      quietMs: QUIET_MS,
      leaveMs: LEAVE_MS,
      ports: [],
      addresses: ['127.0.0.1'],
      ...options,
      shared,
    };
    const worker = new Worker(await workerFile(new URL('./guard-thread.js', import.meta.url)), {
      workerData,
      execArgv: [],
      name: 'trefoil-guard',
    });
    const lifeline = await answerOf<Lifeline | null>(worker);
    return new RankGuard(shared, worker, lifeline);
  }

  /** Connects this rank's lifeline to rank 0. */
  async hold(lifeline: Lifeline): Promise<void> {
    this.#worker.postMessage(lifeline);
    await answerOf(this.#worker);
  }

  /** A rank whose process has exited; null if none is known. */
  gone(): number | null {
    return rankIn(this.#words, WORDS.gone);
  }

  /** A rank that has sent no heartbeat for the whole time limit, because it or its machine is stopped; null if none. */
  silent(): number | null {
    return rankIn(this.#words, WORDS.silent);
  }

  begin(phase: 'join' | 'exchange' | 'leave'): void {
    Atomics.store(this.#words, WORDS.phase, PHASES.indexOf(phase));
    this.moved();
  }

  moved(): void {
    Atomics.add(this.#words, WORDS.moves, 1);
  }

  end(): void {
    Atomics.store(this.#words, WORDS.phase, PHASES.indexOf('idle'));
  }

  /** The files of the run, in which each rank records its current section; null if there are none. */
  watch(paths: RunPaths | null): void {
    const text = Buffer.from(paths ? dirname(paths.lock) : '');
    const isShort = text.length <= FOLDER_BYTES;
    if (isShort) this.#folder.set(text);
    Atomics.store(this.#words, WORDS.folderBytes, isShort ? text.length : 0);
  }

  close(): void {
    Atomics.store(this.#words, WORDS.isClosed, 1);
  }
}

/** Resolves with the thread's next message. Only while waiting for it does the thread keep the process alive. */
async function answerOf<Answer>(worker: Worker): Promise<Answer> {
  worker.ref();
  const answer = await new Promise<Answer>((resolve, reject) => {
    worker.once('message', resolve);
    worker.once('error', reject);
  });
  worker.unref();
  return answer;
}
