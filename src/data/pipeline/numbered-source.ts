/** Opens a source whose samples are known by number: prepared or cached shards, or generated tokens. */

import type { MixedSource } from '../../config/mixture.js';
import type { Config } from '../../config/schema.js';
import { UsageError } from '../../errors.js';
import { RangeStream, rangesLength, StreamSamples, singleRange, type TokenRanges, WholeStream } from '../batch.js';
import type { OpenOptions } from '../loader.js';
import { openCached } from '../shards/cache.js';
import { ShardReader } from '../shards/reader.js';
import { splitCorpus } from '../shards/split.js';
import { openChats } from '../sources/chats/source.js';
import { corpusOptions, describeFiles, openCorpus } from '../sources/corpus.js';
import { checkVocabulary, createTokenizer, type Tokenizer } from '../tokenizer.js';
import { type NumberedSource, openNeedle, openStories, openSynthetic } from './generated-source.js';
import { Mixture, type Part } from './mixture.js';

export async function openNumberedSource(
  config: Config,
  options: OpenOptions,
  paths?: readonly string[],
): Promise<NumberedSource> {
  const { source, sources, vocab_size } = config.data;
  if (sources !== null) return openMixture(config, sources, options);
  const tokenizer = createTokenizer(config.data.tokenizer);
  if (source === 'synthetic') return openSynthetic(config, vocab_size ?? tokenizer.vocabSize, options.evaluate);
  if (source === 'needle') return openNeedle(config, vocab_size ?? tokenizer.vocabSize, options.evaluate);
  checkVocabulary(config.data.tokenizer, tokenizer, vocab_size);
  if (source === 'chat') return openChats(config, tokenizer, options, paths);
  if (source === 'stories') return openStories(config, tokenizer, options.evaluate);
  const { val_path } = config.data;
  const readers = [await openShards(config, tokenizer, options, paths)];
  try {
    if (val_path !== null && options.evaluate !== 'all')
      readers.push(await openValidationShards(config, val_path, tokenizer, options));
    for (const reader of readers) checkTokenizer(reader, config.data.tokenizer, tokenizer);
    return openStream(config, readers[0], readers[1], tokenizer, options);
  } catch (error) {
    for (const reader of readers) reader.close();
    throw error;
  }
}

/** Opens the sources of a mixture one after the other: each may use all cores while it is tokenised. */
async function openMixture(
  config: Config,
  sources: readonly MixedSource[],
  options: OpenOptions,
): Promise<NumberedSource> {
  const parts: Part[] = [];
  const close = () => {
    for (const { source } of parts) source.close();
  };
  try {
    for (const spec of sources) {
      const data = { ...config.data, sources: null, source: spec.source, path: spec.path };
      parts.push({ spec, source: await openPart({ ...config, data }, spec.name, options) });
      // Hashes of large shards take longer than data.loader_timeout allows a source to be silent.
      const counts = { documents: 0, tokens: 0, bytes: 0 };
      options.onProgress?.({ ...counts, parts: parts.length, totalParts: sources.length });
    }
    const mixture = new Mixture(parts, config);
    return {
      vocabSize: Math.max(...parts.map(({ source }) => source.vocabSize)),
      identity: 'mixture',
      tokensPerEpoch: Number.POSITIVE_INFINITY,
      train: mixture,
      validation: undefined,
      validationSamples: parts.reduce((sum, { source }) => sum + source.validationSamples, 0),
      documentMask: mixture.documentMask,
      mixture,
      close,
    };
  } catch (error) {
    close();
    throw error;
  }
}

/** Messages about a source of a mixture name it in place of data.path. */
async function openPart(config: Config, name: string, options: OpenOptions): Promise<NumberedSource> {
  try {
    return await openNumberedSource(config, options);
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    throw new UsageError(`data.sources: ${name}: ${error.message.replace(/^data\.path: /, '')}`, { cause: error });
  }
}

async function openShards(
  config: Config,
  tokenizer: Tokenizer,
  options: OpenOptions,
  paths?: readonly string[],
): Promise<ShardReader> {
  const { data } = config;
  const verify = options.verify ?? true;
  if (data.source === 'tokens') {
    if (paths !== undefined) throw new UsageError('data.path: data.source tokens takes one folder, not a list');
    const reader = ShardReader.open(data.path!, { verify });
    const { skippedFiles } = reader.index;
    if (skippedFiles > 0) options.onWarning?.(`${skippedFiles} binary files were skipped when the shards were made`);
    return reader;
  }
  const base = corpusOptions(config, options);
  const spec = await openCorpus({ ...base, ...(paths && { path: paths }), shuffle: false, partBytes: 'auto' });
  const { reader, report } = await openCached(spec, tokenizer, data.tokenizer, {
    verify,
    folder: options.cacheFolder ?? undefined,
    limitBytes: data.cache_gb * 2 ** 30,
    environment: options.environment,
    onProgress: options.onProgress,
  });
  for (const line of describeFiles(spec, report)) options.onNotice?.(line);
  return reader;
}

/** As openShards, from `data.val_path`; messages name that key. */
async function openValidationShards(
  config: Config,
  path: string,
  tokenizer: Tokenizer,
  options: OpenOptions,
): Promise<ShardReader> {
  try {
    return await openShards({ ...config, data: { ...config.data, path } }, tokenizer, options);
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    throw new UsageError(error.message.replace(/^data\.path:/, 'data.val_path:'), { cause: error });
  }
}

function checkTokenizer({ folder, index }: ShardReader, name: string, { identity }: Tokenizer): void {
  if (index.tokenizer.identity === identity) return;
  throw new UsageError(
    `${folder} was prepared with tokenizer ${index.tokenizer.name}, but data.tokenizer is ${name}; ` +
      'set data.tokenizer to the one used, or prepare the data again',
  );
}

/** `separate` holds the validation documents where they have a path of their own; else a part of `reader` is set aside. */
function openStream(
  config: Config,
  reader: ShardReader,
  separate: ShardReader | undefined,
  tokenizer: Tokenizer,
  options: OpenOptions,
): NumberedSource {
  const { data, train } = config;
  const { index, documentStarts } = reader;
  const seed = data.seed ?? train.seed;
  const split = splitCorpus({
    name: data.path ?? reader.folder,
    tokens: index.tokens,
    documentStarts,
    seed: data.split_seed,
    valFraction: separate === undefined ? data.val_fraction : 0,
    sequenceLength: train.seq_len,
  });
  const wholeOf = ({ index: { tokens } }: ShardReader) => singleRange(0, tokens);
  const samplesOf = (from: ShardReader, ranges: TokenRanges, shuffle: boolean) =>
    new StreamSamples(new RangeStream(from, ranges), train.seq_len, seed, shuffle);
  const whole =
    options.evaluate === 'all' ? new WholeStream(new RangeStream(reader, wholeOf(reader)), train.seq_len) : undefined;
  const validation = separate === undefined ? split.validation : wholeOf(separate);
  const validationTokens = validation === undefined ? 0 : rangesLength(validation);
  if (separate !== undefined && validationTokens <= train.seq_len)
    throw new UsageError(
      `data.val_path: ${data.val_path} has ${validationTokens} tokens, too few for a sample of ${train.seq_len + 1}; ` +
        'add text or lower train.seq_len (--seq-len)',
    );
  return {
    vocabSize: data.vocab_size ?? tokenizer.vocabSize,
    identity: index.checksum,
    tokensPerEpoch: rangesLength(split.train),
    train: samplesOf(reader, split.train, data.shuffle),
    validation: whole ?? (validation && samplesOf(separate ?? reader, validation, false)),
    // Unlike a training window, a validation window never wraps around the end.
    validationSamples: whole?.perEpoch ?? Math.max(0, Math.floor((validationTokens - 1) / train.seq_len)),
    close: () => {
      reader.close();
      separate?.close();
    },
  };
}
