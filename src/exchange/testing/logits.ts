/** Logits of models in files, and how far two results are apart. */

import { sequenceLogits } from '../../evaluate/logits.js';
import { loadModel } from '../../infer/load.js';
import { cpu } from '../../testing/devices.js';

/** Logits [token * vocabulary], on the CPU. */
export function logitsOf(path: string, ids: ArrayLike<number>): Float32Array {
  using loaded = loadModel(cpu(), path, 'f32');
  const chunks = [...sequenceLogits(loaded.model, ids)].map((chunk) => chunk.slice());
  const all = new Float32Array(chunks.reduce((total, { length }) => total + length, 0));
  let at = 0;
  for (const chunk of chunks) {
    all.set(chunk, at);
    at += chunk.length;
  }
  return all;
}

/** The largest distance, relative to the largest expected number; NaN if there is one. */
export function distance(found: ArrayLike<number>, expected: ArrayLike<number>): number {
  if (found.length !== expected.length) throw new Error(`${found.length} numbers, not ${expected.length}`);
  let [worst, largest] = [0, 0];
  for (let i = 0; i < expected.length; i++) {
    largest = Math.max(largest, Math.abs(expected[i]));
    const error = Math.abs(found[i] - expected[i]);
    if (!(error <= worst)) worst = error; // NaN wins
  }
  return worst / largest;
}
