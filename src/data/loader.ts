/**
 * Batches for training and evaluation, from any source: the entry of the data room. Samples that are known by number
 * (shards, chats, generated tokens) come from `NumberedLoader`; documents that are tokenised while training runs come from
 * `StreamLoader`.
 */

import { type CamelKeys, snakeKeys } from '../config/casing.js';
import { ignoredPath, isOneOf, readsPath, STREAMED_SOURCES } from '../config/data-sources.js';
import { parseConfig } from '../config/parse.js';
import type { Config, ConfigInput } from '../config/schema.js';
import { type TrefoilError, UsageError } from '../errors.js';
import type { Batch } from './batch.js';
import { NumberedLoader } from './pipeline/numbered-loader.js';
import { openNumberedSource } from './pipeline/numbered-source.js';
import type { LoaderState } from './pipeline/position.js';
import { StreamLoader } from './pipeline/stream-loader.js';
import { corpusOptions, describeFiles, openCorpus } from './sources/corpus.js';

/** Counters of a loader that reads ahead. */
export interface LoaderTelemetry {
  /** Documents read since the start of the process, and their bytes of text. */
  readonly documents: number;
  readonly bytes: number;
  /** Batches that are ready. */
  readonly queueFill: number;
}

/** How far a run has come in a source of a mixture. */
export interface SourceProgress {
  readonly name: string;
  /** Training tokens that were taken from it. */
  readonly tokens: number;
  /** Passes over it, with their fraction. 0 for sources without end. */
  readonly epoch: number;
  /** Training tokens of one pass; Infinity for sources without end. */
  readonly tokensPerEpoch: number;
}

/** A source of a mixture that has validation samples. */
export interface ValidationSource {
  readonly name: string;
  /** Its share of the training tokens. */
  readonly weight: number;
  /** Whole validation samples. */
  readonly samples: number;
}

/** A source of training and validation batches with an exact position. */
export interface Loader {
  readonly vocabSize: number;
  /** The name of what the batches come from now, if it may differ from `data.source`: `synthetic` replaces a failed source. */
  readonly source?: string | undefined;
  /** Continues on synthetic tokens (`data.synthetic_on_fail`), once; the position stays. All ranks call it together. */
  fallBack?(error: TrefoilError): void;
  /** Training tokens; Infinity for streamed and generated data, as is samplesPerEpoch. */
  readonly tokensPerEpoch: number;
  readonly samplesPerEpoch: number;
  /** Whole samples set aside for validation. */
  readonly validationSamples: number;
  /** The next batch. */
  next(): Batch;
  /** Waits until `batches` can be taken without waiting. Rejects when the source is dead. Only of loaders that read ahead. */
  ready?(batches: number): Promise<void>;
  /** Whether `ready(batches)` would return at once. */
  isReady?(batches: number): boolean;
  /** The next batches: the objects that `next` will return, so that they can be told apart. Empty if fewer are ready. */
  lookAhead?(batches: number): readonly Batch[];
  /** Like `ready`, for `evalBatches(batches)`. */
  readyToEvaluate?(batches: number): Promise<void>;
  /** Documents and bytes read, and batches ready, for progress lines. */
  telemetry?(): LoaderTelemetry;
  /** Mixtures (data.sources) only: what was taken from each source up to a position; default: the present one. */
  sources?(position?: object): readonly SourceProgress[];
  /** Mixtures only: the first source that ends within the next `samples` samples of all ranks, and after how many of them. */
  firstEnd?(samples: number): { readonly name: string; readonly after: number } | null;
  /** Mixtures only: the sources that have validation samples. */
  readonly validationSources?: readonly ValidationSource[] | undefined;
  /** The position, a JSON value that `restore` accepts. */
  state(): object;
  /** Continues after the last batch of the run that saved this state. Takes constant time. */
  restore(state: unknown): void;
  /**
   * At most `count` batches of validation samples for this rank, the same at every call: all samples, or as many as fit,
   * evenly spread. Every rank gets the same number of batches of the same shape. Rows without a sample have only ignored
   * targets, so weigh each batch by its targetCount. A mixture gives `count` batches of the named source, or of each.
   */
  evalBatches(count: number, source?: string): Iterable<Batch>;
  /** Stops reading and frees buffers and threads. */
  close(): void;
}

/** Whether synthetic tokens can still replace the source of a loader. */
export function canFallBack(loader: Loader): boolean {
  return loader.fallBack !== undefined && loader.source !== 'synthetic';
}

/** A loader of a source: its position has a documented form. */
export interface DataLoader extends Loader {
  state(): LoaderState;
}

/** Progress of tokenising a source. */
export interface BuildProgress {
  readonly documents: number;
  readonly tokens: number;
  /** UTF-8 bytes of text. */
  readonly bytes: number;
  readonly parts: number;
  readonly totalParts: number;
}

/** How a source is opened: the rank, the cache folder, callbacks. */
export interface OpenOptions {
  /** Default 0 of 1. */
  readonly rank?: number | undefined;
  readonly world?: number | undefined;
  /** The part that `evalBatches` covers: the validation part (default), or the whole source, every target once. */
  readonly evaluate?: 'validation' | 'all' | undefined;
  /** HF_ENDPOINT, HF_TOKEN and TREFOIL_CACHE are read from it. Default: that of the process. */
  readonly environment?: Readonly<Record<string, string | undefined>> | undefined;
  /** Folder for tokenised text and fetched data. Default: `$TREFOIL_CACHE/data` or the user's cache folder. */
  readonly cacheFolder?: string | undefined;
  /** Compare the hashes of shards while opening them. Default true. */
  readonly verify?: boolean | undefined;
  /** Called while text is tokenised. */
  readonly onProgress?: ((progress: BuildProgress) => void) | undefined;
  /** Called with lines about the files that are read and skipped. */
  readonly onNotice?: ((line: string) => void) | undefined;
  /** Receives lines about data that was skipped or repaired. */
  readonly onWarning?: ((line: string) => void) | undefined;
}

/** The keys of a config's `data` section in camelCase (docs/reference/config.md), and the shape of a batch. */
export interface LoaderOptions extends CamelKeys<Omit<NonNullable<ConfigInput['data']>, 'path'>>, OpenOptions {
  /** A file, folder or glob, or several. */
  readonly path?: string | readonly string[] | null | undefined;
  /** Tokens of a sample. Default 2048. */
  readonly seqLen?: number | undefined;
  /** Samples of a batch. Default 1. */
  readonly batchSize?: number | undefined;
}

/** A loader for programs. Its options are checked as a config is checked. */
export async function createLoader(options: LoaderOptions): Promise<DataLoader> {
  const { rank, world, evaluate, environment, cacheFolder, verify, onProgress, onNotice, onWarning, ...keys } = options;
  const { seqLen, batchSize, path, ...data } = keys;
  const paths = [path ?? []].flat();
  const config = parseConfig({
    data: { ...snakeKeys(data), ...(paths.length > 0 && { path: paths[0] }) },
    train: { seq_len: seqLen, batch_size: batchSize },
  });
  const open = { rank, world, evaluate, environment, cacheFolder, verify, onProgress, onNotice, onWarning };
  return openLoader(config, open, paths.length > 1 ? paths : undefined);
}

/** The loader of a config. `paths` replaces `data.path` where there are several. */
export async function openLoader(
  config: Config,
  options: OpenOptions = {},
  paths?: readonly string[],
): Promise<DataLoader> {
  const { data, train } = config;
  const { rank = 0, world = 1 } = options;
  if (!(Number.isInteger(rank) && Number.isInteger(world) && rank >= 0 && rank < world))
    throw new UsageError(`rank: ${rank} is not a whole number from 0 to ${world - 1}`);
  if (data.path !== null && !readsPath(data.source)) throw new UsageError(ignoredPath(data.source));
  if (!isOneOf(STREAMED_SOURCES, data.source))
    return new NumberedLoader(config, options, await openNumberedSource(config, options, paths));
  const spec = await openCorpus({ ...corpusOptions(config, options), ...(paths && { path: paths }) });
  for (const line of describeFiles(spec)) options.onNotice?.(line);
  const count = (value: number, name: string) => `${value} ${name}${value === 1 ? '' : 's'}`;
  const notice = options.onNotice ?? (() => {});
  const loader = new StreamLoader({
    spec,
    tokenizer: data.tokenizer,
    sequenceLength: train.seq_len,
    batchSize: train.batch_size,
    rank,
    world,
    documentMask: data.document_mask,
    workers: data.workers,
    documentBatch: data.doc_batch,
    prefetch: data.prefetch,
    queue: Math.max(data.queue, data.warmup_batches),
    timeout: data.loader_timeout,
    evaluate: options.evaluate,
    ...(data.vocab_size !== null && { vocabulary: data.vocab_size }),
    report: {
      every: data.report_docs,
      say: (documents, bytes) => notice(`data: ${documents} docs processed, ${(bytes / 1e6).toFixed(1)} MB of text`),
    },
  });
  const ahead = data.prefetch ? `up to ${loader.batchesAhead} batches read ahead` : 'no batch read ahead';
  notice(`data: ${count(spec.lanes, 'lane')}, ${count(data.workers, 'worker')}, ${ahead}`);
  return loader;
}
