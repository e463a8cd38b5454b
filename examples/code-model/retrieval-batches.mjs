// Training batches of retrieval.mjs, written by a thread of their own while the device computes.
import { once } from 'node:events';
import { fileURLToPath } from 'node:url';
import { isMainThread, parentPort, Worker, workerData } from 'node:worker_threads';
import { createLoader, createTokenizer } from 'trefoil/data';
import { RetrievalTask, random } from './retrieval-task.mjs';

/** Batches that are written ahead. */
const AHEAD = 4;

/** Windows of `length` tokens of a folder of shards, in a seeded order. */
export function openCode(path, tokenizer, length, seed) {
  return createLoader({ source: 'tokens', path, tokenizer, val_fraction: 0, batch_size: 1, seq_len: length, seed });
}

/**
 * Batches for all stages ({lengths, steps}): each length has an equal share of the `tokens` of a batch. `path`: token shards
 * of `tokenizer`; `textShare` of the tokens that are no answers count for the loss too.
 */
export async function* trainingBatches(options) {
  const worker = new Worker(fileURLToPath(import.meta.url), { workerData: options });
  const failed = once(worker, 'error').then(([error]) => Promise.reject(error));
  failed.catch(() => {}); // awaited below
  const count = options.stages.reduce((sum, { steps }) => sum + steps, 0);
  const queue = [];
  let wake = () => {};
  worker.on('message', (batch) => {
    queue.push(batch);
    wake();
  });
  for (let i = 0; i < count; i++) {
    if (queue.length === 0)
      await Promise.race([
        failed,
        new Promise((resolve) => {
          wake = resolve;
        }),
      ]);
    yield queue.shift();
    worker.postMessage('next');
  }
  await worker.terminate();
}

async function work({ path, tokenizer, stages, tokens, textShare, seed }) {
  const task = new RetrievalTask(createTokenizer(tokenizer));
  const draw = random(seed);
  let credit = AHEAD;
  let wake = () => {};
  parentPort.on('message', () => {
    credit++;
    wake();
  });
  for (const { lengths, steps } of stages) {
    const loaders = await Promise.all(lengths.map((length) => openCode(path, tokenizer, length, seed)));
    for (let step = 0; step < steps; step++) {
      while (credit === 0)
        await new Promise((resolve) => {
          wake = resolve;
        });
      credit--;
      parentPort.postMessage(batchOf(lengths, loaders));
      await new Promise(setImmediate); // let messages in
    }
    for (const loader of loaders) loader.close();
  }
  parentPort.close();

  function batchOf(lengths, loaders) {
    const [inputs, targets, starts] = [new Int32Array(tokens), new Int32Array(tokens), [0]];
    for (const [i, length] of lengths.entries())
      for (let row = 0; row < tokens / lengths.length / length; row++) {
        const at = starts.at(-1);
        const sequence = task.trainingSequence(loaders[i].next().inputs, length, textShare, draw);
        inputs.set(sequence.inputs, at);
        targets.set(sequence.targets, at);
        starts.push(at + length);
      }
    return { inputs, targets, cuSeqlens: Int32Array.from(starts) };
  }
}

if (!isMainThread) await work(workerData);
