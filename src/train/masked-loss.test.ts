/** The loss on assistant tokens only: its gradient against finite differences in float64, over packed chats. */
import { expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import { IGNORED_TARGET, packBatch } from '../data/batch.js';
import type { EncodedChat } from '../data/sources/chats/encode.js';
import { ChatSamples } from '../data/sources/chats/samples.js';
import { LanguageModel } from '../model/language-model.js';
import { modelShape } from '../model/shape.js';
import { crossEntropyForward } from '../ops/crossentropy/reference.js';
import { cpu } from '../testing/devices.js';
import { modelForward } from '../testing/model-reference.js';
import { dot, randomValues } from '../testing/numbers.js';
import { BatchUploader } from './device-batch.js';
import { LocalGradients } from './gradient-exchange.js';
import { launchGradients, targetWeights, weightedLoss } from './step.js';

const VOCABULARY = 40;
const SEQUENCE = 24;

/** A chat of questions and answers in turns of these lengths. */
function chat(seed: number, ...turns: readonly [question: number, answer: number][]): EncodedChat {
  const counted = turns.flatMap(([question, answer]) => [
    ...Array.from({ length: question }, () => 0),
    ...Array.from({ length: answer }, () => 1),
  ]);
  const tokens = Int32Array.from(randomValues(counted.length, seed), (value) => Math.floor((value + 1) * 19));
  return { tokens, counted: Uint8Array.from(counted) };
}

it('has the gradients of the float64 reference', () => {
  const config = parseConfig({
    model: {
      dim: 16,
      n_layers: 1,
      n_heads: 2,
      n_kv_groups: 1,
      d_k: 8,
      d_v: 8,
      attention: 'dense',
      mlp: 'swiglu',
      mlp_ratio: 2,
    },
  });
  const shape = modelShape(config, VOCABULARY);
  const model = new LanguageModel(cpu(), shape, 1);
  const weights = new Map<string, Float64Array>();
  model.parameters.forEach(({ name, value }, k) => {
    const scale = (x: number) => (/norm$/.test(name) ? 1 + 0.2 * x : 0.3 * x);
    const values = randomValues(value.size, k + 1).map((x) => Math.fround(scale(x)));
    value.write(values);
    weights.set(name, values);
  });
  const weight = (name: string) => weights.get(name) ?? expect.fail(`there is no ${name}`);

  // Two micro-batches of two rows with very different numbers of targets.
  const chats = [chat(11, [5, 4], [3, 6]), chat(12, [2, 1]), chat(13, [9, 8]), chat(14, [12, 2]), chat(15, [4, 15])];
  const options = { sequenceLength: SEQUENCE, padding: 0, seed: 1, shuffle: false };
  const samples = new ChatSamples(chats, options);
  const packing = { sequenceLength: SEQUENCE, documentMask: true };
  const batches = [0, 2].map((first) =>
    packBatch(
      samples,
      [first, first + 1].map((index) => samples.locate(index)),
      packing,
    ),
  );
  const counts = batches.map(({ targetCount }) => targetCount);
  expect(counts.reduce((sum, count) => sum + count, 0)).toBe(4 + 6 + 1 + 8 + 2 + 15);
  expect(counts[0]).not.toBe(counts[1]);

  /** The sum over the assistant's tokens of every chat, each chat by itself, divided by their number: no masks, no packing. */
  const reference = () => {
    let [sum, count] = [0, 0];
    for (const { tokens, counted } of chats) {
      const ids = Array.from(tokens.subarray(0, -1));
      const targets = ids.map((_, t) => (counted[t + 1] === 1 ? tokens[t + 1] : IGNORED_TARGET));
      const { losses } = crossEntropyForward(modelForward(shape, weight, ids).logits, targets, VOCABULARY);
      sum += losses.reduce((total, loss) => total + loss, 0);
      count += targets.filter((target) => target !== IGNORED_TARGET).length;
    }
    return sum / count;
  };

  const uploader = new BatchUploader(cpu(), shape.nsa);
  const uploaded = batches.map((batch) => uploader.upload(batch));
  const shares = targetWeights(batches);
  const means = launchGradients(
    { model, config, exchange: new LocalGradients(model.parameters), loss: undefined },
    uploaded,
    shares,
  );
  expect(Math.abs(weightedLoss(means, shares) - reference())).toBeLessThan(1e-5);
  for (const { name, gradient } of model.parameters) {
    const values = weight(name);
    const direction = randomValues(values.length, 77);
    const start = values.slice();
    const lossAt = (step: number) => {
      values.set(start.map((value, i) => value + step * direction[i]));
      return reference();
    };
    const step = 1e-5;
    const slope = (lossAt(step) - lossAt(-step)) / (2 * step);
    values.set(start);
    const found = Float64Array.from(gradient!.read());
    const size = Math.sqrt(dot(found, found)) + 1e-6;
    expect(Math.abs(dot(found, direction) - slope) / (size * Math.sqrt(values.length)), name).toBeLessThan(1e-4);
  }
  for (const batch of uploaded) uploader.release(batch);
  for (const mean of means) mean.free();
  uploader.free();
  model.free();
});
