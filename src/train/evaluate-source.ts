/** The loss of a model on a source: as validation in training computes it, for any part of any data. */
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import type { Loader } from '../data/loader.js';
import { UsageError } from '../errors.js';
import type { LanguageModel } from '../model/language-model.js';
import { BatchUploader } from './batches.js';
import { type Evaluation, evaluate } from './evaluate.js';
import { openTrainingData } from './training-data.js';

export interface SourceEvaluation extends Evaluation {
  readonly batches: number;
}

type Say = (line: string) => void;

/**
 * At most `count` batches: of the validation part where data.val_fraction sets one aside, else of the whole source from its
 * beginning, each sample once.
 */
export async function evaluateSource(
  model: LanguageModel,
  config: Config,
  count: number,
  { say, warn, environment }: { say: Say; warn: Say; environment: Readonly<Record<string, string | undefined>> },
): Promise<SourceEvaluation> {
  const { loader } = await openTrainingData(config, say, warn, { environment });
  const uploader = new BatchUploader(model.device, config.nsa);
  try {
    if (loader.vocabSize > model.shape.vocab_size)
      throw new UsageError(
        `the data has ${loader.vocabSize} tokens and the model ${model.shape.vocab_size}: it was trained with another tokenizer`,
      );
    const batches =
      config.data.val_fraction > 0
        ? await validationBatches(loader, count)
        : await firstBatches(loader, count, config.train.batch_size);
    const evaluation = evaluate(model, uploader, batches, config);
    return { ...evaluation, batches: batches.length };
  } finally {
    uploader.free();
    loader.close();
  }
}

async function validationBatches(loader: Loader, count: number): Promise<Batch[]> {
  await loader.readyToEvaluate?.(count);
  const batches = [...loader.evalBatches(count)];
  if (batches.length === 0)
    throw new UsageError('data.val_fraction: the validation part holds no whole sample; lower --seq-len');
  return batches;
}

/** Samples wrap around at the end of the data: the batch that would begin again is left out. */
async function firstBatches(loader: Loader, count: number, rows: number): Promise<Batch[]> {
  const whole = Math.floor(loader.samplesPerEpoch / rows);
  if (whole === 0)
    throw new UsageError(
      `the source holds ${loader.samplesPerEpoch} samples, less than a batch of ${rows}: lower --batch-size or --seq-len`,
    );
  const batches: Batch[] = [];
  while (batches.length < Math.min(count, whole)) {
    await loader.ready?.(1);
    batches.push(loader.next());
  }
  return batches;
}
