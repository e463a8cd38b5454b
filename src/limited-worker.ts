/**
 * Work on data of strangers in a thread that can be ended: every task has a limit of time, and the thread one of memory. A
 * task over a limit ends the thread; the next task gets a new one. Tasks of one `LimitedWorker` run one after another.
 */
import { parentPort, Worker } from 'node:worker_threads';
import { TrefoilError, UsageError } from './errors.js';
import { workerFile } from './worker-file.js';

/** Loading the program is the package's own work, but also reads files, such as a tokenizer. */
const START_SECONDS = 60;
/** Nested data is read recursively. */
const STACK_MIB = 4;

export interface LimitedWorkerOptions {
  /** URL of the compiled program (`new URL('./name.js', import.meta.url)`), which calls `answerTasks`. */
  readonly program: URL;
  /** Given to the program as `workerData`. */
  readonly data?: unknown;
  /** Limit of one task. */
  readonly seconds: number;
  /** Limit of the thread's JavaScript heap. Typed arrays are not part of it. */
  readonly mebibytes: number;
  /** The thread ends when it had nothing to do for this long. Default: never. */
  readonly idleSeconds?: number;
}

/** A task that took more time or memory than it may. */
export class LimitExceeded extends TrefoilError {
  readonly limit: 'time' | 'memory';

  constructor(limit: 'time' | 'memory', { seconds, mebibytes }: LimitedWorkerOptions) {
    super(limit === 'time' ? `it takes more than ${seconds} s` : `it needs more than ${mebibytes} MiB`);
    this.limit = limit;
  }
}

/** Messages of the thread. Errors that people can fix keep their class and message. */
type FromThread<Output, Note> =
  | { readonly type: 'ready' }
  | { readonly type: 'note'; readonly note: Note }
  | { readonly type: 'done'; readonly output: Output }
  | { readonly type: 'failed'; readonly message: string; readonly kind: 'usage' | 'expected' | 'defect' };

interface Task<Input, Output, Note> {
  readonly input: Input;
  readonly onNote: (note: Note) => void;
  readonly resolve: (output: Output) => void;
  readonly reject: (error: Error) => void;
}

interface Thread {
  readonly worker: Worker;
  readonly ready: Promise<void>;
}

/** `Note`: what a task may tell before it is done. */
export class LimitedWorker<Input, Output, Note = never> {
  readonly #options: LimitedWorkerOptions;
  readonly #waiting: Task<Input, Output, Note>[] = [];
  #task: Task<Input, Output, Note> | null = null;
  #thread: Promise<Thread> | null = null;
  /** The thread whose messages count. */
  #current: Worker | null = null;
  #timer: NodeJS.Timeout | undefined;
  #isClosed = false;

  constructor(options: LimitedWorkerOptions) {
    this.#options = options;
  }

  /** Tasks that run and wait. */
  get tasks(): number {
    return this.#waiting.length + (this.#task ? 1 : 0);
  }

  /** Starts the thread, which the first task would do otherwise. */
  async start(): Promise<void> {
    await (await this.#started()).ready;
  }

  /** Rejects with `LimitExceeded`, or with the error of the task. `input` is copied, shared memory is shared. */
  run(input: Input, onNote: (note: Note) => void = () => {}): Promise<Output> {
    return new Promise((resolve, reject) => {
      this.#waiting.push({ input, onNote, resolve, reject });
      void this.#next();
    });
  }

  /** Ends the thread and rejects its tasks. */
  async close(): Promise<void> {
    this.#isClosed = true;
    const thread = this.#thread;
    this.#drop(new Error('the worker was closed'));
    for (const { reject } of this.#waiting.splice(0)) reject(new Error('the worker was closed'));
    await (await thread)?.worker.terminate();
  }

  async #next(): Promise<void> {
    if (this.#task) return;
    const task = this.#waiting.shift();
    if (!task) return;
    this.#task = task;
    clearTimeout(this.#timer);
    try {
      if (this.#isClosed) throw new Error('the worker was closed');
      const { worker, ready } = await this.#started();
      worker.ref(); // the process must not end before its task
      await ready;
      if (this.#task !== task) return; // closed meanwhile
      this.#timer = setTimeout(() => this.#end(new LimitExceeded('time', this.#options)), 1000 * this.#options.seconds);
      worker.postMessage(task.input);
    } catch (error) {
      if (this.#task === task) this.#drop(error as Error);
      void this.#next();
    }
  }

  #started(): Promise<Thread> {
    this.#thread ??= workerFile(this.#options.program).then((file) => this.#launch(file));
    return this.#thread;
  }

  #launch(file: URL): Thread {
    const { data, mebibytes } = this.#options;
    const resourceLimits = { maxOldGenerationSizeMb: mebibytes, maxYoungGenerationSizeMb: 16, stackSizeMb: STACK_MIB };
    const worker = new Worker(file, { workerData: data, resourceLimits });
    const ready = new Promise<void>((resolve, reject) => {
      const late = setTimeout(() => fail(new LimitExceeded('time', { ...this.#options, seconds: START_SECONDS })), 1000 * START_SECONDS); // biome-ignore format: one line
      const fail = (error: Error) => {
        clearTimeout(late);
        reject(error);
        if (worker === this.#current) this.#end(error);
      };
      worker.on('message', (message: FromThread<Output, Note>) => {
        if (message.type === 'ready') {
          clearTimeout(late);
          resolve();
        } else if (worker === this.#current) this.#take(message);
      });
      worker.on('error', (error: NodeJS.ErrnoException) => {
        const isMemory = error.code === 'ERR_WORKER_OUT_OF_MEMORY';
        fail(isMemory ? new LimitExceeded('memory', this.#options) : error);
      });
      worker.on('exit', () => fail(new Error('the thread ended before its task')));
    });
    ready.catch(() => {}); // told to the task that waits for it, if any
    worker.unref();
    this.#current = worker;
    return { worker, ready };
  }

  #take(message: Exclude<FromThread<Output, Note>, { type: 'ready' }>): void {
    const task = this.#task;
    if (!task) return;
    if (message.type === 'note') {
      task.onNote(message.note);
      return;
    }
    clearTimeout(this.#timer);
    this.#task = null;
    this.#current?.unref();
    if (message.type === 'done') task.resolve(message.output);
    else if (message.kind === 'usage') task.reject(new UsageError(message.message));
    else task.reject(message.kind === 'expected' ? new TrefoilError(message.message) : new Error(message.message));
    const { idleSeconds } = this.#options;
    if (this.#waiting.length === 0 && idleSeconds !== undefined)
      this.#timer = setTimeout(() => this.#end(null), 1000 * idleSeconds).unref();
    void this.#next();
  }

  /** Ends the thread; its task, if there is one, fails with the error. */
  #end(error: Error | null): void {
    const worker = this.#current;
    this.#drop(error);
    void worker?.terminate();
    void this.#next();
  }

  #drop(error: Error | null): void {
    clearTimeout(this.#timer);
    const task = this.#task;
    this.#task = null;
    this.#thread = null;
    this.#current = null;
    task?.reject(error ?? new Error('the thread was ended'));
  }
}

/** The program of a `LimitedWorker`: calls `answer` for every task. What it returns or notes is copied to the other thread. */
export function answerTasks<Input, Output, Note = never>(
  answer: (input: Input, note: (note: Note) => void) => Output | Promise<Output>,
): void {
  const port = parentPort;
  if (!port) throw new Error('answerTasks runs in a worker');
  const send = (message: FromThread<Output, Note>) => port.postMessage(message);
  port.on('message', async (input: Input) => {
    try {
      send({ type: 'done', output: await answer(input, (note) => send({ type: 'note', note })) });
    } catch (error) {
      const kind = error instanceof UsageError ? 'usage' : error instanceof TrefoilError ? 'expected' : 'defect';
      const { message, stack } = error as Error;
      send({ type: 'failed', message: kind === 'defect' ? (stack ?? message) : message, kind });
    }
  });
  send({ type: 'ready' });
}
