/**
 * A worker thread that writes the log files of a run, so that a slow or hung file system never stops the training thread.
 *
 * Files are opened on the training thread (log.ts), and their descriptors are handed to the worker (log-worker.ts). Records
 * go there as messages and get their form there; once `QUEUE_RECORDS` are waiting, more are dropped and counted. All waits
 * for the worker are bounded by `WAIT_MS`, and after one has timed out nothing waits again until the worker has made
 * progress.
 */
import { MessageChannel, type MessagePort, receiveMessageOnPort, Worker } from 'node:worker_threads';
import koffi from '../../device/koffi.js';
import { workerFile } from '../../worker-file.js';
import type { Log, LogFormat, OpenFile } from './log.js';
import { type LogTask, type LogWorkerData, MAX_FILES, WORDS } from './log-tasks.js';

export interface LogThreadOptions {
  /** Receives one line when writing starts to fail or stall, and one when it works again. */
  readonly onProblem?: (message: string) => void;
  /** Longest wait for the worker in a flush or at the end, in milliseconds. */
  readonly waitMs?: number;
}

/** About 4 MiB. */
const QUEUE_RECORDS = 5000;
const WAIT_MS = 5_000;
/** Without progress for this long, a person is told. */
const STALL_MS = 5_000;

export class LogThread {
  readonly #worker: Worker;
  readonly #words: Int32Array;
  readonly #problems: MessagePort;
  readonly #onProblem: (message: string) => void;
  readonly #waitMs: number;
  #files = 0;
  #posted = 0;
  #lastDone = 0;
  #lastProgress = performance.now();
  #isStalled = false;
  #isClosed = false;

  private constructor(worker: Worker, words: Int32Array, problems: MessagePort, options: LogThreadOptions) {
    this.#worker = worker;
    this.#words = words;
    this.#problems = problems;
    this.#onProblem = options.onProblem ?? (() => {});
    this.#waitMs = options.waitMs ?? WAIT_MS;
  }

  /** Starts the worker and waits until it runs. */
  static async start(options: LogThreadOptions = {}): Promise<LogThread> {
    const shared = new SharedArrayBuffer(Int32Array.BYTES_PER_ELEMENT * (WORDS.drops + MAX_FILES));
    const { port1, port2 } = new MessageChannel();
    port1.unref();
    const workerData: LogWorkerData = { shared, problems: port2 };
    const file = await workerFile(new URL('./log-worker.js', import.meta.url));
    const worker = new Worker(file, {
      workerData,
      transferList: [port2],
      execArgv: [],
      name: 'trefoil-logs',
      trackUnmanagedFds: false, // the worker closes descriptors that it did not open
    });
    await new Promise<void>((resolve, reject) => {
      worker.once('online', resolve);
      worker.once('error', reject);
    });
    worker.unref();
    return new LogThread(worker, new Int32Array(shared), port1, options);
  }

  /** Hands a file over to the worker, which closes it. */
  open<Item>({ path, descriptor }: OpenFile, format: LogFormat): Log<Item> {
    if (this.#files === MAX_FILES) throw new RangeError(`a log thread takes at most ${MAX_FILES} files`);
    const file = this.#files++;
    const words = this.#words;
    let refused = 0;
    this.#post({ kind: 'open', file, opened: { path, descriptor }, format });
    return {
      path,
      get drops() {
        return refused + Atomics.load(words, WORDS.drops + file);
      },
      write: (record) => {
        if (!this.#write(file, record)) refused += 1;
      },
      flush: () => {
        this.#post({ kind: 'flush', file });
        return this.#wait() && Atomics.load(words, WORDS.flushed) === 1;
      },
      close: () => this.#post({ kind: 'close', file }),
    };
  }

  /** Records held up by a write that does not return; 0 while the worker makes progress. */
  get stuck(): number {
    this.#report();
    return this.#isStalled ? Atomics.load(this.#words, WORDS.queued) : 0;
  }

  /** Waits, at most `waitMs`, until everything posted is done. A worker that is stuck in a system call is left behind. */
  close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    const isDone = this.#wait();
    this.#report();
    this.#problems.close();
    if (isDone) void this.#worker.terminate();
    else leaveWithoutThread();
  }

  /** False if the record was dropped. */
  #write(file: number, record: unknown): boolean {
    this.#report();
    if (Atomics.load(this.#words, WORDS.queued) >= QUEUE_RECORDS) return false;
    Atomics.add(this.#words, WORDS.queued, 1);
    this.#post({ kind: 'write', file, record, at: Date.now() });
    return true;
  }

  #post(task: LogTask): void {
    this.#posted += 1;
    this.#worker.postMessage(task);
  }

  /** Waits until the worker has done everything; false after `waitMs`, or at once if it is known to be stuck. */
  #wait(): boolean {
    const deadline = performance.now() + this.#waitMs;
    for (;;) {
      this.#report();
      const done = Atomics.load(this.#words, WORDS.done);
      if (done === this.#posted) return true;
      const left = deadline - performance.now();
      if (this.#isStalled || left <= 0) {
        this.#stalled();
        return false;
      }
      Atomics.wait(this.#words, WORDS.done, done, left);
    }
  }

  /** Passes on what the worker reported, and notices when it makes no progress. */
  #report(): void {
    for (let next = receiveMessageOnPort(this.#problems); next; next = receiveMessageOnPort(this.#problems))
      this.#onProblem(next.message as string);
    const done = Atomics.load(this.#words, WORDS.done);
    const now = performance.now();
    if (done !== this.#lastDone || done === this.#posted) {
      const wasStalled = this.#isStalled;
      this.#isStalled = false;
      this.#lastDone = done;
      this.#lastProgress = now;
      // Last: the receiver may write the line to a file of this thread.
      if (wasStalled) this.#onProblem('log files: writing again');
    } else if (now - this.#lastProgress > STALL_MS) this.#stalled();
  }

  #stalled(): void {
    if (this.#isStalled) return;
    this.#isStalled = true;
    this.#onProblem(
      'log files: a write does not return; training goes on, up to ' +
        `${QUEUE_RECORDS} records are kept and more are dropped. Check the file system of the run folder`,
    );
  }
}

/**
 * The end of a process waits for its threads, and a thread inside a system call that does not return cannot be stopped.
 * `_exit` ends the process without waiting, with the exit code that was decided.
 */
function leaveWithoutThread(): void {
  const exit = koffi
    .load(process.platform === 'darwin' ? 'libSystem.B.dylib' : 'libc.so.6')
    .func('_exit', 'void', ['int']);
  process.once('exit', (code) => exit(code));
}
