/** The thread that saves checkpoints (save-thread.ts): writes what was copied, by the code that also saves without a thread. */
import { type MessagePort, parentPort } from 'node:worker_threads';
import type { TensorToWrite } from '../safetensors.js';
import { SaveFailed, type SaveOptions, saveCheckpoint } from './save.js';
import type { CopiedTensor, SaveAnswer, SaveTask } from './save-tasks.js';

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

if (parentPort) serveSaves(parentPort);
