/** The loss of a model on a source: as validation in training computes it, for any part of any data. */
import type { Config } from '../config/schema.js';
import { type Batch, IGNORED_TARGET } from '../data/batch.js';
import { createTokenizer, type Tokenizer } from '../data/tokenizer.js';
import { UsageError } from '../errors.js';
import type { Terminal } from '../live-line.js';
import type { LanguageModel } from '../model/language-model.js';
import { BatchUploader } from './batches.js';
import { type Evaluation, evaluate as evaluateBatches } from './evaluate.js';
import { openTrainingData } from './training-data.js';

export interface SourceEvaluation extends Evaluation {
  readonly batches: number;
  /** Whether every sample of the evaluated part was counted; false when `count` batches did not reach its end. */
  readonly complete: boolean;
  /** Bits of loss per UTF-8 byte of the predicted text; null for sources that are no text. */
  readonly bitsPerByte: number | null;
}

type Say = (line: string) => void;

export interface EvaluationOptions {
  readonly say: Say;
  readonly warn: Say;
  readonly environment: Readonly<Record<string, string | undefined>>;
  /** Where the live line of tokenising goes. */
  readonly terminal?: Terminal;
}

/**
 * At most `count` batches: of the validation part where data.val_fraction sets one aside, else of the whole source from its
 * beginning. Every target counts once, also those of a last sample that is short and of a last batch that is not full.
 */
export async function evaluateSource(
  model: LanguageModel,
  config: Config,
  count: number,
  { say, warn, environment, terminal }: EvaluationOptions,
): Promise<SourceEvaluation> {
  const { data } = config;
  const evaluate = data.val_fraction > 0 ? 'validation' : 'all';
  const { loader } = await openTrainingData(config, say, warn, {
    environment,
    evaluate,
    ...(terminal && { terminal }),
  });
  const uploader = new BatchUploader(model.device, config.nsa);
  try {
    if (loader.vocabSize > model.shape.vocabSize)
      throw new UsageError(
        `the data has ${loader.vocabSize} tokens and the model ${model.shape.vocabSize}: it was trained with another tokenizer`,
      );
    await loader.readyToEvaluate?.(count);
    const batches = [...loader.evalBatches(count)];
    if (batches.length === 0)
      throw new UsageError('the source holds no whole sample to evaluate; lower --seq-len or raise data.val_fraction');
    const evaluation = evaluateBatches(model, uploader, batches, config);
    const samples = Math.min(loader.validationSamples, count * config.train.batch_size);
    const isText = data.source !== 'synthetic' && data.source !== 'needle';
    const bytes = isText ? targetBytes(batches, createTokenizer(data.tokenizer)) : 0;
    return {
      ...evaluation,
      batches: batches.length,
      complete: samples === loader.validationSamples,
      bitsPerByte: bytes === 0 ? null : (evaluation.loss * evaluation.targets) / Math.LN2 / bytes,
    };
  } finally {
    uploader.free();
    loader.close();
  }
}

/** UTF-8 bytes of all targets that count. */
function targetBytes(batches: readonly Batch[], tokenizer: Tokenizer): number {
  let bytes = 0;
  for (const { targets } of batches)
    for (const target of targets) if (target !== IGNORED_TARGET) bytes += tokenizer.byteLength(target);
  return bytes;
}
