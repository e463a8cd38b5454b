/** The mean loss on batches. */
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import { kernelOptions } from '../model/kernels.js';
import { Tape } from '../tensor/tape.js';
import type { BatchUploader } from './device-batch.js';
import { type Agreement, SingleAgreement } from './ranks/agreement.js';
import type { LossFunction, TrainableModel } from './step.js';

/** The result of an evaluation. */
export interface Evaluation {
  /** Mean loss per target in nats; NaN without targets. */
  readonly loss: number;
  readonly perplexity: number;
  readonly targets: number;
  /** Mixtures only: each source's. `loss` is then their mean by the weights of the mixture. */
  readonly bySource?: readonly SourceLoss[];
}

/** The loss on the validation data of one source of a mixture. */
export interface SourceLoss {
  readonly name: string;
  readonly loss: number;
  readonly targets: number;
}

/** The evaluation of a mixture from those of its sources, by weight. Sources without a target count for nothing. */
export function mixedEvaluation(parts: readonly (SourceLoss & { readonly weight: number })[]): Evaluation {
  const counted = parts.filter(({ targets }) => targets > 0);
  const weights = counted.reduce((sum, { weight }) => sum + weight, 0);
  const loss = counted.reduce((sum, { weight, loss: own }) => sum + weight * own, 0) / weights;
  return {
    loss,
    perplexity: Math.exp(loss),
    targets: counted.reduce((sum, { targets }) => sum + targets, 0),
    bySource: counted.map(({ name, loss: own, targets }) => ({ name, loss: own, targets })),
  };
}

/**
 * Every rank calls it with its own batches and gets the same result. `loss` replaces the model's loss; otherwise `observe`
 * receives the loss of every target, if the model computes these.
 */
export function evaluate(
  model: Pick<TrainableModel, 'device' | 'loss' | 'losses'>,
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
    const options = { lengths: onDevice.sequences, kernels: kernelOptions(config) };
    if (loss || !model.losses) {
      const tape = new Tape(model.device, { record: false });
      const { ids, targets: wanted } = onDevice;
      const value = loss ? loss(tape, onDevice, options) : model.loss(tape, ids, wanted, options);
      total += value.item() * batch.targetCount;
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
