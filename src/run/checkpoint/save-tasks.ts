/** The work of the thread that saves checkpoints (save-thread.ts): what it is told, what it does, and what it answers. */
import type { MessagePort } from 'node:worker_threads';
import type { TensorToWrite } from '../tensor-source.js';
import { type SavedCheckpoint, SaveFailed, type SaveOptions, saveCheckpoint } from './save.js';

/** A tensor of f32 in the copy. */
export interface CopiedTensor {
  readonly name: string;
  readonly shape: readonly number[];
  /** Its bytes in the copy. */
  readonly from: number;
  readonly to: number;
}

export interface SaveTask {
  readonly runDir: string;
  readonly step: number;
  /** The copy, handed over and handed back. */
  readonly memory: ArrayBuffer;
  readonly model: readonly CopiedTensor[];
  readonly optimizer: readonly CopiedTensor[];
  readonly state: Record<string, unknown>;
  readonly keepLast: number | undefined;
}

export type SaveAnswer = { readonly memory: ArrayBuffer } & (
  | { readonly saved: SavedCheckpoint }
  /** The disk refused it. */
  | { readonly refused: string }
  /** A bug, or a state that no checkpoint can hold. */
  | { readonly error: unknown }
);

/** Saves what comes through the port. `onWrite`: see `SaveOptions`. */
export function serveSaves(port: MessagePort, onWrite?: SaveOptions['onWrite']): void {
  port.on('message', (task: SaveTask) => {
    const { memory } = task;
    const answer: SaveAnswer = { memory, ...attempt(task, onWrite) };
    port.postMessage(answer, [memory]);
  });
}

function attempt(
  { runDir, step, memory, model, optimizer, state, keepLast }: SaveTask,
  onWrite: SaveOptions['onWrite'],
) {
  const written = (tensors: readonly CopiedTensor[]): TensorToWrite[] =>
    tensors.map(({ name, shape, from, to }) => ({
      name,
      dtype: 'F32',
      shape,
      data: new Uint8Array(memory, from, to - from),
    }));
  const options = { ...(keepLast !== undefined && { keepLast }), ...(onWrite && { onWrite }) };
  try {
    const parts = { model: written(model), optimizer: written(optimizer) };
    return { saved: saveCheckpoint(runDir, step, parts, state, options) };
  } catch (error) {
    return error instanceof SaveFailed ? { refused: error.message } : { error };
  }
}
