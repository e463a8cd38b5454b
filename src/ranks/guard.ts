/**
 * A thread beside the one that trains, for the moments in which that one is blocked: while a GPU waits for a rank that is
 * gone, calls of CUDA and NCCL may not return, and whoever made them cannot look about. The thread then names the rank to
 * blame and kills the process, which is all that can be done from outside.
 *
 * The threads of all ranks also hold a connection to that of rank 0, their lifeline: when a process ends, wherever it is,
 * the connection does, and everybody hears of it. NCCL tells only the neighbours, and some networks tell them late. A process
 * that is stopped keeps its connections; that its thread is silent tells it from one that works (pulse.ts).
 */
import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { Worker } from 'node:worker_threads';
import type { Guard } from '../device/cuda/nccl.js';
import type { RunPaths } from '../run/run-paths.js';
import {
  FOLDER_AT,
  FOLDER_MOST,
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

  /** Of rank 0, for the others to hold; null on the others, and where none can be offered. */
  readonly lifeline: Lifeline | null;
  readonly #worker: Worker;

  private constructor(shared: SharedArrayBuffer, worker: Worker, lifeline: Lifeline | null) {
    this.#worker = worker;
    this.lifeline = lifeline;
    this.#words = new Int32Array(shared, 0, WORDS.count);
    this.#folder = new Uint8Array(shared, FOLDER_AT);
  }

  static async start(options: GuardOptions): Promise<RankGuard> {
    const shared = new SharedArrayBuffer(FOLDER_AT + FOLDER_MOST);
    const workerData: GuardTask = {
      ...{ quietMs: QUIET_MS, leaveMs: LEAVE_MS, ports: [], addresses: ['127.0.0.1'], ...options, shared },
    };
    const worker = new Worker(await threadFile(), { workerData, execArgv: [], name: 'trefoil-guard' });
    const lifeline = await answerOf<Lifeline | null>(worker);
    return new RankGuard(shared, worker, lifeline);
  }

  /** Takes hold of rank 0's lifeline: what happens to this process from then on is noticed there, if it can be reached. */
  async hold(lifeline: Lifeline): Promise<void> {
    this.#worker.postMessage(lifeline);
    await answerOf(this.#worker);
  }

  /** A rank whose process is known to have ended; null while none is. */
  gone(): number | null {
    return rankIn(this.#words, WORDS.gone);
  }

  /** A rank of which nothing was heard for the whole time limit, since it is stopped, or its machine; null while all are heard. */
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

  /** Whose files tell what the other ranks do; null when there are none. */
  watch(paths: RunPaths | null): void {
    const text = Buffer.from(paths ? dirname(paths.lock) : '');
    const isShort = text.length <= FOLDER_MOST;
    if (isShort) this.#folder.set(text);
    Atomics.store(this.#words, WORDS.folderBytes, isShort ? text.length : 0);
  }

  close(): void {
    Atomics.store(this.#words, WORDS.isClosed, 1);
  }
}

/** The thread's next message. Otherwise a process that has nothing else to do may end. */
async function answerOf<Answer>(worker: Worker): Promise<Answer> {
  worker.ref();
  const answer = await new Promise<Answer>((resolve, reject) => {
    worker.once('message', resolve);
    worker.once('error', reject);
  });
  worker.unref();
  return answer;
}

/** The thread's program: compiled beside this file, or, when Trefoil runs from its sources, bundled first. */
async function threadFile(): Promise<URL> {
  const compiled = new URL('./guard-thread.js', import.meta.url);
  if (existsSync(compiled)) return compiled;
  const { build } = await import('esbuild');
  const folder = mkdtempSync(join(tmpdir(), 'trefoil-guard-'));
  process.once('exit', () => rmSync(folder, { recursive: true, force: true }));
  const outfile = join(folder, 'guard-thread.mjs');
  const source = fileURLToPath(new URL('./guard-thread.ts', import.meta.url));
  await build({ entryPoints: [source], bundle: true, platform: 'node', format: 'esm', outfile, logLevel: 'error' });
  return pathToFileURL(outfile);
}
