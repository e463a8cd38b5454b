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
  return createLoader({ source: 'tokens', path, tokenizer, valFraction: 0, batchSize: 1, seqLen: length, seed });
}

/**
 * Starts the thread. `batches` yields `steps` batches of the current stage, each length of the stage with an equal share of
 * the stage's `tokens`; `advance` changes to the next stage, after the batches that are already written. `path`: token
 * shards of `tokenizer`; `textShare` ({ first, last }: before the last stage, and in it) of the tokens that are neither answers nor
 * repeated count for the loss too. Stages before the `repeatedUntil`-th repeat pieces of their code.
 */
export function startBatches(options) {
  const worker = new Worker(fileURLToPath(import.meta.url), { workerData: options });
  const failed = once(worker, 'error').then(([error]) => Promise.reject(error));
  failed.catch(() => {}); // awaited below
  const queue = [];
  let wake = () => {};
  worker.on('message', (batch) => {
    queue.push(batch);
    wake();
  });
  async function* batches() {
    for (let i = 0; i < options.steps; i++) {
      if (queue.length === 0) {
        const arrived = new Promise((resolve) => {
          wake = resolve;
        });
        await Promise.race([failed, arrived]);
      }
      yield queue.shift();
      worker.postMessage('next');
    }
  }
  return {
    batches: batches(),
    advance: () => worker.postMessage('advance'),
    close: () => worker.terminate(),
  };
}

async function work({ path, tokenizer, stages, steps, textShare, repeatedUntil, seed }) {
  const task = new RetrievalTask(createTokenizer(tokenizer));
  const draw = random(seed);
  const loaders = new Map();
  let stage = 0;
  let credit = AHEAD;
  let wake = () => {};
  parentPort.on('message', (message) => {
    if (message === 'advance') stage++;
    else credit++;
    wake();
  });
  for (let step = 0; step < steps; step++) {
    while (credit === 0)
      await new Promise((resolve) => {
        wake = resolve;
      });
    credit--;
    const isLast = stage > 0 && stage + 1 === stages.length;
    const options = { textShare: isLast ? textShare.last : textShare.first, isRepeated: stage < repeatedUntil };
    parentPort.postMessage(await batchOf(stages[stage], options));
    await new Promise(setImmediate); // let messages in
  }

  async function batchOf({ lengths, tokens }, options) {
    const [inputs, targets, starts] = [new Int32Array(tokens), new Int32Array(tokens), [0]];
    for (const length of lengths) {
      if (!loaders.has(length)) loaders.set(length, await openCode(path, tokenizer, length, seed));
      for (let row = 0; row < tokens / lengths.length / length; row++) {
        const at = starts.at(-1);
        const sequence = task.trainingSequence(loaders.get(length).next().inputs, length, options, draw);
        inputs.set(sequence.inputs, at);
        targets.set(sequence.targets, at);
        starts.push(at + length);
      }
    }
    return { inputs, targets, cuSeqlens: Int32Array.from(starts) };
  }
}

if (!isMainThread) await work(workerData);
