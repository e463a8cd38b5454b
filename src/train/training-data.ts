/** The data of a run, as its config asks for it: a time limit for the first batch, and synthetic tokens only by request. */
import type { Config } from '../config/schema.js';
import { createLoader, type Loader, type LoaderOptions } from '../data/loader.js';
import { createTokenizer } from '../data/tokenizer.js';
import { ExitCode, TrefoilError, UsageError } from '../errors.js';

type Say = (line: string) => void;

export interface TrainingData {
  readonly loader: Loader;
  /** Where the tokens really come from: `synthetic` when that stands in for a source that failed. */
  readonly data: string;
}

export async function openTrainingData(config: Config, say: Say, warn: Say): Promise<TrainingData> {
  const { source, path, synthetic_on_fail: mayReplace } = config.data;
  try {
    const loader = await openSource(config, say, warn);
    const tokens = Number.isFinite(loader.tokensPerEpoch) ? `${loader.tokensPerEpoch} training tokens` : 'without end';
    say(`data: ${source}${path ? ` ${path}` : ''}, ${tokens}, ${loader.validationSamples} validation samples`);
    return { loader, data: source };
  } catch (error) {
    if (!(error instanceof TrefoilError) || !mayReplace || source === 'synthetic') throw error;
    warn(`${error.message}; training on SYNTHETIC random tokens instead, because of --synthetic-on-fail`);
    return { loader: await createLoader({ ...loaderOptions(config), source: 'synthetic' }), data: 'synthetic' };
  }
}

async function openSource(config: Config, say: Say, warn: Say): Promise<Loader> {
  const { data } = config;
  const { source } = data;
  if (source === 'fineweb_edu' || source === 'fineweb_edu_local')
    throw new UsageError(`data.source: ${source} is not part of this version; use text, jsonl, tokens or synthetic`);
  const limit = new StallLimit(data.loader_timeout);
  let reported = 0;
  const loading = createLoader({
    ...loaderOptions(config),
    source,
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
  };
}

/** Fails when nothing has moved for so many seconds: preparing a large corpus may take long, a stall may not. */
class StallLimit {
  readonly exceeded: Promise<never>;
  #last = performance.now();
  readonly #timer: NodeJS.Timeout;

  constructor(seconds: number) {
    let fail: (error: TrefoilError) => void;
    this.exceeded = new Promise((_, reject) => {
      fail = reject;
    });
    this.exceeded.catch(() => {}); // whoever races with it sees the error; without a race nobody must
    this.#timer = setInterval(
      () => {
        if (performance.now() - this.#last < seconds * 1000) return;
        const remedy = 'check the source, or allow more with --loader-timeout';
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
