/** Opens the data that a config names: the samples to train on, those to validate on, and their identity. */

import { UsageError } from '../errors.js';
import { Purpose } from './hash.js';
import { NeedleSamples, parseCurriculum } from './needle-samples.js';
import { RangeStream, rangesLength, singleRange } from './ranges.js';
import { openCached } from './shards/cache.js';
import { listTextSource, type OnProgress } from './shards/prepare.js';
import { ShardReader } from './shards/reader.js';
import { splitCorpus } from './split.js';
import { StorySamples } from './stories/samples.js';
import { type Samples, StreamSamples, WholeStream } from './stream.js';
import { SyntheticSamples } from './synthetic.js';
import { createTokenizer, type Tokenizer } from './tokenizer.js';

/** As in the config: `data` with the seed and shapes of `train`. */
export interface SourceOptions {
  source: 'synthetic' | 'needle' | 'stories' | 'text' | 'jsonl' | 'tokens';
  /** Files, folders or patterns for text and jsonl; the folder of shards for tokens. */
  path?: string | readonly string[] | undefined;
  tokenizer: string;
  val_fraction: number;
  seed: number;
  seq_len: number;
  batch_size: number;
  /** Default false. */
  document_mask?: boolean | undefined;
  /** Default true. */
  shuffle?: boolean | undefined;
  /** The model's vocabulary: the range of synthetic tokens, an upper bound for the tokenizer's otherwise. */
  vocab_size?: number | undefined;
  /** Default "text". */
  text_field?: string | undefined;
  /** What `evalBatches` covers: the validation part (default), or the whole source, every target once. */
  evaluate?: 'validation' | 'all' | undefined;
  /** Of source stories: samples at the start that are drills. Default 0. */
  stories_drills?: number | undefined;
  /** Of source needle. */
  needle?: NeedleOptions | undefined;
}

/** As in the config: the keys that begin with `needle_`. */
export interface NeedleOptions {
  readonly records: number;
  readonly facts: number;
  readonly questions: number;
  readonly absent: number;
  readonly curriculum: string | null;
}

/** How a source is opened. */
export interface OpenSourceOptions {
  cacheFolder?: string | undefined;
  /** Compare hashes of all shards while opening. Default true. */
  verify?: boolean | undefined;
  onProgress?: OnProgress | undefined;
  onWarning?: ((message: string) => void) | undefined;
}

export interface OpenSource {
  readonly vocabSize: number;
  /** Equal for equal tokens, wherever they lie. */
  readonly identity: string;
  readonly tokensPerEpoch: number;
  readonly train: Samples;
  readonly validation: Samples | undefined;
  /** Whole samples in the validation part. */
  readonly validationSamples: number;
  /** Documents of a sample are always kept apart, whatever data.document_mask says. */
  readonly documentMask?: boolean;
  close(): void;
}

export async function openSource(options: SourceOptions, open: OpenSourceOptions): Promise<OpenSource> {
  if (options.source === 'synthetic') return openSynthetic(options);
  if (options.source === 'needle') return openNeedle(options);
  const tokenizer = createTokenizer(options.tokenizer);
  if (options.vocab_size !== undefined && tokenizer.vocabSize > options.vocab_size) {
    throw new UsageError(
      `data.tokenizer: ${options.tokenizer} has ${tokenizer.vocabSize} tokens, more than the vocabulary of ` +
        `${options.vocab_size}; raise it to at least ${tokenizer.vocabSize} or choose another tokenizer`,
    );
  }
  if (options.source === 'stories') return openStories(options, tokenizer);
  const reader = await openShards(options, tokenizer, open);
  try {
    return openCorpus(options, reader, tokenizer, open);
  } catch (error) {
    reader.close();
    throw error;
  }
}

function openSynthetic(options: SourceOptions): OpenSource {
  const vocabSize = options.vocab_size;
  if (vocabSize === undefined) throw new UsageError('data.source synthetic needs a vocabulary size; set vocab_size');
  return {
    vocabSize,
    identity: `synthetic:${vocabSize}`,
    tokensPerEpoch: Number.POSITIVE_INFINITY,
    ...withEvaluation(
      options,
      new SyntheticSamples(vocabSize, options.seed, 'train'),
      new SyntheticSamples(vocabSize, options.seed, 'validation'),
    ),
    close: () => {},
  };
}

/** The evaluated part of a source without end. */
function withEvaluation(
  { evaluate, val_fraction }: SourceOptions,
  train: Samples,
  validation: Samples,
): Pick<OpenSource, 'train' | 'validation' | 'validationSamples'> {
  if (evaluate === 'all') return { train, validation: train, validationSamples: Number.POSITIVE_INFINITY };
  if (val_fraction === 0) return { train, validation: undefined, validationSamples: 0 };
  return { train, validation, validationSamples: Number.POSITIVE_INFINITY };
}

function openNeedle(options: SourceOptions): OpenSource {
  const { vocab_size: vocabSize, needle, seed, seq_len: length } = options;
  if (vocabSize === undefined) throw new UsageError('data.source needle needs a vocabulary size; set vocab_size');
  if (needle === undefined) throw new UsageError('data.source needle needs its own settings; set needle');
  const { records, facts, questions, absent, curriculum } = needle;
  const task = { vocabSize, records, facts, questions, absent };
  const stages = parseCurriculum(curriculum, length);
  return {
    vocabSize,
    identity: `needle:${JSON.stringify({ task, stages })}`,
    tokensPerEpoch: Number.POSITIVE_INFINITY,
    ...withEvaluation(
      options,
      new NeedleSamples(task, stages, length, seed, Purpose.needleTrain),
      // Validation has the final length only: that is what the run is for.
      new NeedleSamples(task, stages.slice(-1), length, seed, Purpose.needleValidation),
    ),
    documentMask: true,
    close: () => {},
  };
}

function openStories(options: SourceOptions, tokenizer: Tokenizer): OpenSource {
  const { seq_len: sequenceLength, seed, stories_drills: drills = 0 } = options;
  return {
    vocabSize: tokenizer.vocabSize,
    identity: `stories:${drills}:${tokenizer.identity}`,
    tokensPerEpoch: Number.POSITIVE_INFINITY,
    ...withEvaluation(
      options,
      new StorySamples(tokenizer, { sequenceLength, drills }, seed, Purpose.storiesTrain),
      new StorySamples(tokenizer, { sequenceLength, drills: 0 }, seed, Purpose.storiesValidation),
    ),
    documentMask: true,
    close: () => {},
  };
}

async function openShards(options: SourceOptions, tokenizer: Tokenizer, open: OpenSourceOptions): Promise<ShardReader> {
  const { source, path } = options;
  const verify = open.verify ?? true;
  if (path === undefined || path.length === 0) throw new UsageError(`data.path: needed by data.source ${source}`);
  if (source === 'text' || source === 'jsonl') {
    return openCached(await listTextSource(source, path, options.text_field), tokenizer, {
      verify,
      ...(open.cacheFolder !== undefined && { folder: open.cacheFolder }),
      ...(open.onProgress !== undefined && { onProgress: open.onProgress }),
    });
  }
  if (typeof path !== 'string') throw new UsageError('data.path: data.source tokens takes one folder, not a list');
  return ShardReader.open(path, { verify });
}

function openCorpus(
  options: SourceOptions,
  reader: ShardReader,
  tokenizer: Tokenizer,
  open: OpenSourceOptions,
): OpenSource {
  const { index, documentStarts } = reader;
  if (index.tokenizer.identity !== tokenizer.identity) {
    throw new UsageError(
      `${reader.folder} was prepared with tokenizer ${index.tokenizer.name}, but data.tokenizer is ` +
        `${options.tokenizer}; set data.tokenizer to the one used, or prepare the data again`,
    );
  }
  if (index.skippedFiles > 0) open.onWarning?.(`${index.skippedFiles} files were skipped: not UTF-8 text`);
  const split = splitCorpus({
    name: [options.path ?? []].flat().join(', '),
    tokens: index.tokens,
    documentStarts,
    valFraction: options.val_fraction,
    seed: options.seed,
    sequenceLength: options.seq_len,
  });
  const samplesOf = (ranges: typeof split.train, shuffle: boolean): StreamSamples =>
    new StreamSamples(new RangeStream(reader, ranges), options.seq_len, options.seed, shuffle);
  const whole =
    options.evaluate === 'all'
      ? new WholeStream(new RangeStream(reader, singleRange(0, index.tokens)), options.seq_len)
      : undefined;
  const validationTokens = split.validation === undefined ? 0 : rangesLength(split.validation);
  return {
    vocabSize: options.vocab_size ?? tokenizer.vocabSize,
    identity: index.checksum,
    tokensPerEpoch: rangesLength(split.train),
    train: samplesOf(split.train, options.shuffle ?? true),
    validation: whole ?? (split.validation && samplesOf(split.validation, false)),
    // Unlike a training window, a validation window never wraps around the end.
    validationSamples: whole?.perEpoch ?? Math.max(0, Math.floor((validationTokens - 1) / options.seq_len)),
    close: () => reader.close(),
  };
}
