/** The mean loss over validation batches, weighted by their numbers of targets. */
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import { kernelOptions } from '../model/kernels.js';
import { Tape } from '../tensor/tape.js';
import type { BatchUploader } from './batches.js';
import { type Agreement, SingleAgreement } from './ranks/agreement.js';
import type { LossFunction, TrainableModel } from './step.js';

/** The result of an evaluation. */
export interface Evaluation {
  /** Mean loss per target in nats; NaN without targets. */
  readonly loss: number;
  readonly perplexity: number;
  readonly targets: number;
}

/**
 * Every rank calls it with its own batches and gets the same result. `loss` replaces the model's loss; otherwise `observe`
 * receives the loss of every target.
 */
export function evaluate(
  model: Pick<TrainableModel, 'device' | 'losses'>,
  uploader: BatchUploader,
  batches: Iterable<Batch>,
  config: Config,
  agreement: Agreement = new SingleAgreement(),
  loss?: LossFunction,
  observe?: (batch: Batch, losses: ArrayLike<number>) => void,
): Evaluation {
  let [total, targets] = [0, 0];
  for (const batch of batches) {
    const onDevice = uploader.upload(batch);
    const options = { layout: onDevice.layout, kernels: kernelOptions(config) };
    if (loss) {
      const tape = new Tape(model.device, { record: false });
      total += loss(tape, onDevice, options).item() * batch.targetCount;
      tape.end();
    } else {
      const losses = model.losses(onDevice.ids, onDevice.targets, options);
      const values = losses.read();
      for (const value of values) total += value; // ignored targets have loss 0
      observe?.(batch, values);
      losses.free();
    }
    targets += batch.targetCount;
    uploader.release(onDevice);
  }
  // Each rank has evaluated its share of the batches.
  [total, targets] = agreement.sum([total, targets]);
  const mean = total / targets;
  return { loss: mean, perplexity: Math.exp(mean), targets };
}
