/** The data of a run, as its config asks for it: time limits for the source, and synthetic tokens only by request. */
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { ignoredPath, readsPath } from '../config/data-path.js';
import type { Config } from '../config/schema.js';
import { type CorpusOptions, openCorpus } from '../data/corpus/open.js';
import { MORE_TIME } from '../data/hub/http.js';
import { createLoader, type Loader, type LoaderOptions } from '../data/loader.js';
import { createStreamLoader, type StreamLoader } from '../data/pipeline/loader.js';
import { defaultCacheFolder } from '../data/shards/cache.js';
import { createTokenizer } from '../data/tokenizer.js';
import { ExitCode, TrefoilError, UsageError } from '../errors.js';
import { FallbackLoader } from './fallback-loader.js';

type Say = (line: string) => void;
type Evaluated = 'validation' | 'all' | undefined;
type Environment = Readonly<Record<string, string | undefined>>;

export interface TrainingData {
  readonly loader: Loader;
  /** Where the tokens really come from: `synthetic` when that stands in for a source that failed. */
  readonly data: () => string;
}

/** Which of the processes of a run this is. */
export interface Rank {
  readonly rank: number;
  readonly world: number;
}

export interface OpenDataOptions {
  /** Default: that of the process. */
  readonly environment?: Environment;
  readonly rank?: Rank;
  /** What `evalBatches` covers: the validation part (default), or the whole source. */
  readonly evaluate?: 'validation' | 'all';
}

export async function openTrainingData(
  config: Config,
  say: Say,
  warn: Say,
  { environment = process.env, rank, evaluate }: OpenDataOptions = {},
): Promise<TrainingData> {
  const { source, path, synthetic_on_fail: mayReplace } = config.data;
  if (path !== null && !readsPath(source)) throw new UsageError(ignoredPath(source));
  const openSynthetic = () => createLoader({ ...loaderOptions(config), ...rank, source: 'synthetic' });
  try {
    const loader = await openSource(config, say, warn, { environment, rank, evaluate });
    const tokens = Number.isFinite(loader.tokensPerEpoch) ? `${loader.tokensPerEpoch} training tokens` : 'without end';
    const known = Number.isFinite(loader.validationSamples);
    say(
      `data: ${source}${path ? ` ${path}` : ''}, ${tokens}${known ? `, ${loader.validationSamples} validation samples` : ''}`,
    );
    if (!mayReplace || source === 'synthetic') return { loader, data: () => source };
    const fallback = new FallbackLoader(loader, await openSynthetic(), (error) => warn(replacedLine(error)));
    return { loader: fallback, data: () => (fallback.replaced ? 'synthetic' : source) };
  } catch (error) {
    if (!(error instanceof TrefoilError) || !mayReplace || source === 'synthetic') throw error;
    warn(replacedLine(error));
    return { loader: await openSynthetic(), data: () => 'synthetic' };
  }
}

function replacedLine(error: TrefoilError): string {
  return `${error.message}; training on SYNTHETIC random tokens instead, because of --synthetic-on-fail`;
}

/** Waits until the wanted number of batches lies ready. Fewer after the time limit are a warning: the run begins. */
export async function warmUp(loader: Loader, { data }: Config, warn: Say): Promise<void> {
  const { fwe_warmup_batches: batches, fwe_warmup_timeout: seconds } = data;
  if (batches === 0 || loader.ready === undefined) return;
  const stop = new AbortController();
  const late = sleep(1000 * seconds, true, { signal: stop.signal }).catch(() => false); // only ever aborted, below
  const ready = loader.ready(batches).then(
    () => false,
    (error) => {
      // The first step asks again and meets it; here it only ends the waiting.
      if (error instanceof TrefoilError) return false;
      throw error;
    },
  );
  const isLate = await Promise.race([ready, late]);
  stop.abort();
  if (isLate) warn(`data.fwe_warmup_batches: fewer than ${batches} batches were ready after ${seconds} s; starting`);
}

async function openSource(
  config: Config,
  say: Say,
  warn: Say,
  { environment, rank, evaluate }: { environment: Environment; rank?: Rank | undefined; evaluate?: Evaluated },
): Promise<Loader> {
  const { data } = config;
  const { source } = data;
  if (source === 'fineweb_edu' || source === 'fineweb_edu_local')
    return openStream(config, say, { environment, rank, evaluate });
  const limit = new StallLimit(data.loader_timeout);
  let reported = 0;
  const loading = createLoader({
    ...loaderOptions(config),
    ...rank,
    ...{ source, evaluate },
    ...(data.path === null ? {} : { path: data.path }),
    onWarning: warn,
    onProgress: ({ documents, tokens }) => {
      limit.progress();
      if (data.report_docs === 0 || documents - reported < data.report_docs) return;
      reported = documents;
      say(`tokenised ${documents} documents, ${tokens} tokens`);
    },
  });
  try {
    return await Promise.race([loading, limit.exceeded]);
  } finally {
    limit.end();
  }
}

/** The loader of a streamed source; also for commands that only look at one. */
export async function openStream(
  config: Config,
  say: Say,
  { environment, rank, evaluate }: { environment: Environment; rank?: Rank | undefined; evaluate?: Evaluated },
): Promise<StreamLoader> {
  const { data, train } = config;
  const spec = await openCorpus(corpusOptions(config, environment));
  const count = (value: number, name: string) => `${value} ${name}${value === 1 ? '' : 's'}`;
  say(`data: ${count(spec.files.length, 'file')}, ${count(spec.lanes, 'lane')}, ${count(data.workers, 'worker')}`);
  return createStreamLoader({
    ...{ spec, tokenizer: data.tokenizer, seq_len: train.seq_len, batch_size: train.batch_size, ...rank },
    ...{ document_mask: data.document_mask, workers: data.workers, documentBatch: data.fwe_doc_batch },
    ...{ prefetch: data.fwe_prefetch, queue: Math.max(data.fwe_queue, data.fwe_warmup_batches) },
    ...{ timeout: data.loader_timeout, evaluate },
    ...(data.vocab_size !== null && { vocab_size: data.vocab_size }),
    report: {
      every: data.report_docs,
      say: (documents, bytes) => say(`data: ${documents} documents, ${(bytes / 1e6).toFixed(1)} MB of text`),
    },
  });
}

/** The corpus of a config; commands that read documents take it from here too. */
export function corpusOptions({ data, train }: Config, environment: Environment): CorpusOptions {
  const { source } = data;
  if (source === 'synthetic' || source === 'needle' || source === 'stories' || source === 'tokens')
    throw new UsageError(`data.source: ${source} has no documents; use text, jsonl, fineweb_edu or fineweb_edu_local`);
  return {
    source,
    ...(data.path !== null && { path: data.path }),
    hub: {
      ...{ dataset: data.hub_dataset, configuration: data.hub_config },
      ...{ split: data.hub_split, revision: data.hub_revision },
    },
    ...{ textField: data.text_field, shuffle: data.shuffle, seed: data.seed ?? train.seed },
    ...{ valFraction: data.val_fraction, timeoutSeconds: data.loader_timeout, environment },
    cache: { folder: join(defaultCacheFolder(environment), 'hub'), limitBytes: data.cache_gb * 2 ** 30 },
  };
}

function loaderOptions({ data, train }: Config): Omit<LoaderOptions, 'source'> {
  return {
    ...{ tokenizer: data.tokenizer, val_fraction: data.val_fraction, text_field: data.text_field },
    ...{
      seq_len: train.seq_len,
      batch_size: train.batch_size,
      document_mask: data.document_mask,
      shuffle: data.shuffle,
    },
    seed: data.seed ?? train.seed,
    vocab_size: data.vocab_size ?? createTokenizer(data.tokenizer).vocabSize,
    stories_drills: data.stories_drills,
    needle: {
      ...{ records: data.needle_records, facts: data.needle_facts },
      ...{ questions: data.needle_questions, absent: data.needle_absent, curriculum: data.needle_curriculum },
    },
  };
}

/** Rejects after `seconds` seconds without progress: preparing a large corpus may take long, a stall may not. */
class StallLimit {
  readonly exceeded: Promise<never>;
  #last = performance.now();
  readonly #timer: NodeJS.Timeout;

  constructor(seconds: number) {
    let fail: (error: TrefoilError) => void;
    this.exceeded = new Promise((_, reject) => {
      fail = reject;
    });
    this.exceeded.catch(() => {}); // a no-op handler: an unawaited rejection must not crash the process
    this.#timer = setInterval(
      () => {
        if (performance.now() - this.#last < seconds * 1000) return;
        const remedy = `check the source, or ${MORE_TIME}`;
        fail(new TrefoilError(`the data source gave nothing for ${seconds} s: ${remedy}`, ExitCode.dataSource));
      },
      Math.min(1000, seconds * 250),
    );
  }

  progress(): void {
    this.#last = performance.now();
  }

  end(): void {
    clearInterval(this.#timer);
  }
}
