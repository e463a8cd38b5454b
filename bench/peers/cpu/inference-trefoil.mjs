// One measurement of Trefoil, for inference.mjs: node inference-trefoil.mjs FOLDER THREADS TASK file|int8

import { openDevice } from '../../../dist/device/open.js';
import { readTokens } from '../../../dist/infer/decode.js';
import { loadModel } from '../../../dist/infer/load.js';
import { RecordedSteps } from '../../../dist/infer/recorded-steps.js';
import { DecodeCache } from '../../../dist/model/cache.js';
import { cpuSeconds, measure, report } from './inference-task.mjs';

const [folder, threads, task, weights] = process.argv.slice(2);
const device = openDevice('cpu', { threads: Number(threads) });
const { model } = loadModel(device, folder, 'f32', { weights });
const steps = RecordedSteps.of(model); // as the engine decodes
const TILE = 512;

await measure(task, ({ prompt, decode, batch }) => {
  const cache = new DecodeCache(device, model.shape);
  const sequences = Array.from({ length: batch }, () => cache.sequence());
  const counts = { promptSeconds: 0, decodeSeconds: 0, tokens: [] };
  let before = cpuSeconds();
  for (const sequence of sequences)
    for (let at = 0; at < prompt.length - 1; at += TILE)
      readTokens(model, [sequence], [prompt.slice(at, Math.min(at + TILE, prompt.length - 1))]);
  counts.promptSeconds = cpuSeconds() - before;
  let next = sequences.map(() => prompt.at(-1));
  before = cpuSeconds();
  for (let i = 0; i < decode; i++) {
    const logits =
      steps.read(sequences, next) ??
      readTokens(
        model,
        sequences,
        next.map((token) => [token]),
      );
    next = logits.map(argmax);
    counts.tokens.push(...next);
    if (i === 0) counts.firstTokenSeconds = cpuSeconds();
  }
  counts.decodeSeconds = cpuSeconds() - before;
  for (const sequence of sequences) sequence.free();
  return counts;
});
report();

function argmax(logits) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  return best;
}
