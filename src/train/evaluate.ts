/** The mean loss over validation batches, weighed by how many targets each holds. */
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import { kernelOptions } from '../model/kernels.js';
import type { LanguageModel } from '../model/language-model.js';
import type { Together } from '../ranks/together.js';
import type { BatchUploader } from './batches.js';

export interface Evaluation {
  /** NaN when there was no target. */
  readonly loss: number;
  readonly perplexity: number;
  readonly targets: number;
}

export function evaluate(
  model: LanguageModel,
  uploader: BatchUploader,
  batches: Iterable<Batch>,
  config: Config,
  together?: Together,
): Evaluation {
  let [total, targets] = [0, 0];
  for (const batch of batches) {
    const onDevice = uploader.upload(batch);
    const losses = model.losses(onDevice.ids, onDevice.targets, {
      layout: onDevice.layout,
      kernels: kernelOptions(config),
    });
    for (const loss of losses.read()) total += loss; // ignored targets have loss 0
    targets += batch.targetCount;
    losses.free();
    uploader.release(onDevice);
  }
  // Every rank has evaluated its share of the batches.
  if (together) [total, targets] = together.sum([total, targets]);
  const loss = total / targets;
  return { loss, perplexity: Math.exp(loss), targets };
}
