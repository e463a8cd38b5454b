/** Sources that make their samples: uniform tokens, needles, stories. They read no files and have no end. */

import type { Config } from '../../config/schema.js';
import type { Samples } from '../batch.js';
import { Purpose } from '../hash.js';
import type { OpenOptions } from '../loader.js';
import { NeedleSamples, parseCurriculum } from '../synthetic/needle-samples.js';
import { StorySamples } from '../synthetic/stories/samples.js';
import { UniformSamples } from '../synthetic/uniform.js';
import type { Tokenizer } from '../tokenizer.js';
import type { Mixture } from './mixture.js';

/** A source whose samples are known by number. */
export interface NumberedSource {
  readonly vocabSize: number;
  /** Equal for equal tokens, independent of their place. */
  readonly identity: string;
  readonly tokensPerEpoch: number;
  readonly train: Samples;
  readonly validation: Samples | undefined;
  /** Whole samples in the validation part. */
  readonly validationSamples: number;
  /** True if the documents of a sample are always masked from each other, whatever data.document_mask is. */
  readonly documentMask?: boolean;
  /** Where `train` is a mixture: its sources, which are evaluated one by one. */
  readonly mixture?: Mixture;
  close(): void;
}

export function openSynthetic(config: Config, vocabSize: number, evaluate: OpenOptions['evaluate']): NumberedSource {
  const seed = config.data.seed ?? config.train.seed;
  const [train, validation] = (['train', 'validation'] as const).map(
    (part) => new UniformSamples(vocabSize, seed, part),
  );
  return { ...endless(config, train, validation, evaluate), vocabSize, identity: `synthetic:${vocabSize}` };
}

export function openNeedle(config: Config, vocabSize: number, evaluate: OpenOptions['evaluate']): NumberedSource {
  const { data, train } = config;
  const { needle_records: records, needle_facts: facts, needle_questions: questions, needle_absent: absent } = data;
  const task = { vocabSize, records, facts, questions, absent };
  const stages = parseCurriculum(data.needle_curriculum, train.seq_len);
  const samples = (used: typeof stages, purpose: (typeof Purpose)['needleTrain' | 'needleValidation']) =>
    new NeedleSamples(task, used, train.seq_len, data.seed ?? train.seed, purpose);
  // Validation has the final length only: that is what the run is for.
  const validation = samples(stages.slice(-1), Purpose.needleValidation);
  return {
    ...endless(config, samples(stages, Purpose.needleTrain), validation, evaluate),
    vocabSize,
    identity: `needle:${JSON.stringify({ task, stages })}`,
    documentMask: true,
  };
}

export function openStories(config: Config, tokenizer: Tokenizer, evaluate: OpenOptions['evaluate']): NumberedSource {
  const { data, train } = config;
  const { stories_drills: drills } = data;
  const samples = (used: number, purpose: (typeof Purpose)['storiesTrain' | 'storiesValidation']) => {
    const shape = { sequenceLength: train.seq_len, drills: used };
    return new StorySamples(tokenizer, shape, data.seed ?? train.seed, purpose);
  };
  return {
    ...endless(config, samples(drills, Purpose.storiesTrain), samples(0, Purpose.storiesValidation), evaluate),
    vocabSize: tokenizer.vocabSize,
    documentMask: true,
    identity: `stories:${drills}:${tokenizer.identity}`,
  };
}

/** The common part of sources without end. */
function endless(
  { data }: Config,
  train: Samples,
  validation: Samples,
  evaluate: OpenOptions['evaluate'],
): Omit<NumberedSource, 'vocabSize' | 'identity'> {
  const isEvaluated = evaluate === 'all' || data.val_fraction > 0;
  return {
    tokensPerEpoch: Number.POSITIVE_INFINITY,
    train,
    validation: isEvaluated ? (evaluate === 'all' ? train : validation) : undefined,
    validationSamples: isEvaluated ? Number.POSITIVE_INFINITY : 0,
    close: () => {},
  };
}
