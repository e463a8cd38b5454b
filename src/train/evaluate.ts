/** The mean loss over validation batches, weighted by their numbers of targets, and by position in the context. */
import type { Config } from '../config/schema.js';
import { type Batch, IGNORED_TARGET } from '../data/batch.js';
import { createTokenizer, type Tokenizer } from '../data/tokenizer.js';
import type { Environment } from '../environment.js';
import { UsageError } from '../errors.js';
import type { Terminal } from '../live-line.js';
import { kernelOptions } from '../model/kernels.js';
import type { LanguageModel } from '../model/language-model.js';
import { BatchUploader } from './device-batch.js';
import { type Evaluation, evaluate, mixedEvaluation } from './evaluation.js';
import { type FarContext, FarContextGain } from './far-context.js';
import { openTrainingData } from './training-data.js';

export interface SourceEvaluation extends Evaluation {
  readonly batches: number;
  /** Whether every sample of the evaluated part was counted; false when `count` batches did not reach its end. */
  readonly complete: boolean;
  /** Bits of loss per UTF-8 byte of the predicted text; null for sources that are no text. */
  readonly bitsPerByte: number | null;
  readonly byPosition: readonly PositionLoss[];
  /** Null unless asked for, or if no sample is longer than the cut context. */
  readonly far: FarContext | null;
}

type Say = (line: string) => void;

export interface EvaluationOptions {
  readonly say: Say;
  readonly warn: Say;
  readonly environment: Environment;
  /** Where the live line of tokenising goes. */
  readonly terminal?: Terminal;
  /** Tokens of context that the loss is compared with (far-context.ts). */
  readonly near?: number | undefined;
  /** Called after each batch. */
  readonly onBatch?: (done: number, all: number) => void;
}

/**
 * At most `count` batches: of the validation part where the config has one (data.val_fraction or data.val_path), else of the whole source from its
 * beginning. Every target counts once, also those of a last sample that is short and of a last batch that is not full.
 */
export async function evaluateSource(
  model: LanguageModel,
  config: Config,
  count: number,
  { say, warn, environment, terminal, near, onBatch = () => {} }: EvaluationOptions,
): Promise<SourceEvaluation> {
  const { data } = config;
  const part = data.val_fraction > 0 || data.val_path !== null ? 'validation' : 'all';
  const loader = await openTrainingData(config, say, warn, {
    environment,
    evaluate: part,
    ...(terminal && { terminal }),
  });
  const uploader = new BatchUploader(model.device, config.nsa);
  try {
    if (loader.vocabSize > model.shape.vocabSize)
      throw new UsageError(
        `the data has ${loader.vocabSize} tokens and the model ${model.shape.vocabSize}: it was trained with another tokenizer`,
      );
    await loader.readyToEvaluate?.(count);
    const { validationSources: sources } = loader;
    const batchesOf = sources
      ? sources.map(({ name }) => [...loader.evalBatches(count, name)])
      : [[...loader.evalBatches(count)]];
    const batches = batchesOf.flat();
    if (batches.length === 0)
      throw new UsageError('the source holds no whole sample to evaluate; lower --seq-len or raise data.val_fraction');
    const positions = new PositionLosses();
    const far =
      near === undefined ? null : new FarContextGain(near, (batch) => lossesOf(model, uploader, batch, config));
    let done = 0;
    const evaluations = batchesOf.map((own) =>
      evaluate(model, uploader, own, config, undefined, undefined, (batch, losses) => {
        positions.add(batch, losses);
        far?.add(batch, losses);
        onBatch(++done, batches.length);
      }),
    );
    const evaluation = sources
      ? mixedEvaluation(sources.map((source, i) => ({ ...source, ...evaluations[i] })))
      : evaluations[0];
    // A stream knows its samples only now that it was read.
    const held = sources?.map(({ samples }) => samples) ?? [loader.validationSamples];
    const nats = evaluations.reduce((sum, { loss, targets }) => sum + (targets === 0 ? 0 : loss * targets), 0);
    const isText = data.source !== 'synthetic' && data.source !== 'needle';
    const bytes = isText ? targetBytes(batches, createTokenizer(data.tokenizer)) : 0;
    return {
      ...evaluation,
      batches: batches.length,
      complete: held.every((samples) => samples <= count * config.train.batch_size),
      bitsPerByte: bytes === 0 ? null : nats / Math.LN2 / bytes,
      byPosition: positions.rows(),
      far: far?.result() ?? null,
    };
  } finally {
    uploader.free();
    loader.close();
  }
}

/** The loss of every target of a packed batch. */
function lossesOf(
  model: LanguageModel,
  uploader: BatchUploader,
  batch: Pick<Batch, 'inputs' | 'targets' | 'cuSeqlens'>,
  config: Config,
): Float32Array {
  const { ids, targets, sequences } = uploader.upload(batch);
  const losses = model.losses(ids, targets, { lengths: sequences, kernels: kernelOptions(config) });
  const values = Float32Array.from(losses.read());
  losses.free();
  uploader.release({ ids, targets, sequences });
  return values;
}

/** UTF-8 bytes of all targets that count. */
function targetBytes(batches: readonly Batch[], tokenizer: Tokenizer): number {
  let bytes = 0;
  for (const { targets } of batches)
    for (const target of targets) if (target !== IGNORED_TARGET) bytes += tokenizer.byteLength(target);
  return bytes;
}

/** The mean loss of the targets that are predicted from `from` to `to` tokens of context. */
export interface PositionLoss {
  readonly from: number;
  readonly to: number;
  readonly targets: number;
  /** In nats. */
  readonly loss: number;
}

/** Sums by position. The first row has a context of one token, then 2, 3 to 4, 5 to 8 and so on. */
export class PositionLosses {
  readonly #sums: number[] = [];
  readonly #counts: number[] = [];

  /** `losses`: one per target of the batch. Positions count from the start of each sequence that attention treats apart. */
  add({ targets, cuSeqlens }: Batch, losses: ArrayLike<number>): void {
    for (let sequence = 0; sequence + 1 < cuSeqlens.length; sequence++)
      for (let i = cuSeqlens[sequence]; i < cuSeqlens[sequence + 1]; i++) {
        if (targets[i] === IGNORED_TARGET) continue;
        const row = 32 - Math.clz32(i - cuSeqlens[sequence]);
        this.#sums[row] = (this.#sums[row] ?? 0) + losses[i];
        this.#counts[row] = (this.#counts[row] ?? 0) + 1;
      }
  }

  rows(): PositionLoss[] {
    return Array.from(this.#counts, (targets, row) => ({
      from: row === 0 ? 1 : 2 ** (row - 1) + 1,
      to: 2 ** row,
      targets: targets ?? 0,
      loss: (this.#sums[row] ?? 0) / (targets ?? 0),
    })).filter(({ targets }) => targets > 0);
  }
}
