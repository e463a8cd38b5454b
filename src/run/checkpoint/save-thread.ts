/**
 * Saves checkpoints in a thread of its own, so that training waits only until its state is copied. The thread runs
 * `saveCheckpoint`, so files, their order and their durability are the same. One checkpoint at a time.
 *
 * The copy is one piece of memory that travels to the thread and back. It stays for the whole run: a checkpoint that finds
 * no memory would be one that is missing.
 */
import { freemem } from 'node:os';
import { Worker } from 'node:worker_threads';
import type { Tensor } from '../../tensor/tensor.js';
import { workerFile } from '../../worker-file.js';
import type { CheckpointState } from './read.js';
import { type SavedCheckpoint, SaveFailed } from './save.js';
import type { CopiedTensor, SaveAnswer, SaveTask } from './save-tasks.js';

/** A part of the free memory that the copy leaves to others. */
const SPARE = 0.1;

/** Values of f32 that can be copied: a tensor. */
type Copyable = Pick<Tensor, 'bytes' | 'shape' | 'readInto'>;
type NamedTensors = Iterable<readonly [string, Copyable]>;

/** The content of a checkpoint. */
export interface CheckpointCopy {
  readonly model: NamedTensors;
  readonly optimizer: NamedTensors;
  readonly state: CheckpointState;
}

/** A checkpoint that is being written. */
export interface WrittenCheckpoint {
  /** Whether `result` is settled. */
  readonly isDone: boolean;
  /** Rejects with `SaveFailed` if the disk refused. */
  readonly result: Promise<SavedCheckpoint>;
}

/**
 * A thread that writes checkpoints.
 *
 * @opaque
 */
export class SaveThread {
  readonly #worker: Worker;
  #memory: ArrayBuffer | null = null;
  #isBusy = false;

  private constructor(worker: Worker) {
    this.#worker = worker;
  }

  /** Starts the thread. `file` is another program for it, of a test. */
  static async start(file?: URL): Promise<SaveThread> {
    const program = file ?? (await workerFile(new URL('./save-worker.js', import.meta.url)));
    const worker = new Worker(program, { execArgv: [], env: {}, name: 'trefoil-save' });
    await new Promise<void>((resolve, reject) => {
      worker.once('online', resolve);
      worker.once('error', reject);
    });
    worker.unref();
    return new SaveThread(worker);
  }

  /** Bytes of the copy of these tensors. */
  static bytesOf({ model, optimizer }: Pick<CheckpointCopy, 'model' | 'optimizer'>): number {
    return [...model, ...optimizer].reduce((sum, [, { bytes }]) => sum + bytes, 0);
  }

  /** Whether there is memory for a copy of this size: that of the last one, or free memory. */
  hasRoom(bytes: number): boolean {
    if ((this.#memory?.byteLength ?? 0) >= bytes) return true;
    return bytes <= (1 - SPARE) * availableMemory();
  }

  /**
   * Copies everything before it returns, and writes it in the thread. The caller waits for the result before it saves
   * again.
   */
  save(runDir: string, step: number, copy: CheckpointCopy, keepLast: number | undefined): WrittenCheckpoint {
    if (this.#isBusy) throw new Error('the last checkpoint is still being written');
    const [model, optimizer] = [[...copy.model], [...copy.optimizer]];
    const memory = this.#room(SaveThread.bytesOf({ model, optimizer }));
    let at = 0;
    const copied = (tensors: readonly (readonly [string, Copyable])[]): CopiedTensor[] =>
      tensors.map(([name, tensor]) => {
        const from = at;
        at += tensor.bytes;
        tensor.readInto(new Uint8Array(memory, from, tensor.bytes));
        return { name, shape: [...tensor.shape], from, to: at };
      });
    const task: SaveTask = {
      runDir,
      step,
      memory,
      model: copied(model),
      optimizer: copied(optimizer),
      state: copy.state,
      keepLast,
    };
    this.#isBusy = true;
    this.#worker.postMessage(task, [memory]);
    let isDone = false;
    const result = this.#answer().finally(() => {
      isDone = true;
    });
    result.catch(() => {}); // the caller sees the error when it awaits the result
    return {
      get isDone() {
        return isDone;
      },
      result,
    };
  }

  /** Ends the thread. What is being written is lost; the checkpoints before it are not. */
  close(): void {
    void this.#worker.terminate();
  }

  #room(bytes: number): ArrayBuffer {
    const memory = this.#memory;
    this.#memory = null;
    return memory !== null && memory.byteLength >= bytes ? memory : new ArrayBuffer(bytes);
  }

  #answer(): Promise<SavedCheckpoint> {
    const worker = this.#worker;
    worker.ref(); // the process ends when the checkpoint is written
    return new Promise<SavedCheckpoint>((resolve, reject) => {
      const end = () => {
        worker.off('message', answered);
        worker.off('error', reject);
        worker.off('exit', exited);
        worker.unref();
        this.#isBusy = false;
      };
      const answered = (answer: SaveAnswer) => {
        end();
        this.#memory = answer.memory;
        if ('saved' in answer) resolve(answer.saved);
        else reject('refused' in answer ? new SaveFailed(answer.refused) : answer.error);
      };
      const exited = () => {
        end();
        reject(new Error('the thread that saves checkpoints has ended'));
      };
      worker.on('message', answered);
      worker.once('error', reject);
      worker.once('exit', exited);
    });
  }
}

/** Memory that a process can still get here, by the limit of its container too. */
function availableMemory(): number {
  const { availableMemory: available } = process as { availableMemory?: () => number };
  return available?.() ?? freemem();
}
