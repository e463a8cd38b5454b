/** The data of a run: a time limit for its source, and synthetic tokens in place of a source that fails, if the config allows it. */
import { setTimeout as sleep } from 'node:timers/promises';
import { isOneOf, STREAMED_SOURCES } from '../config/data-sources.js';
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import { type BuildProgress, type Loader, type LoaderTelemetry, openLoader } from '../data/loader.js';
import { BEGINNING } from '../data/pipeline/position.js';
import { silentSource } from '../data/sources/silent.js';
import type { Environment } from '../environment.js';
import { TrefoilError, UsageError } from '../errors.js';
import { LiveLine, type Terminal } from '../live-line.js';
import { plural } from '../text.js';

type Say = (line: string) => void;

/** This process among the ranks of a run. */
export interface Rank {
  readonly rank: number;
  readonly world: number;
}

export interface OpenDataOptions {
  /** Default: that of the process. */
  readonly environment?: Environment;
  readonly rank?: Rank;
  /** The part that `evalBatches` covers: the validation part (default), or the whole source. */
  readonly evaluate?: 'validation' | 'all';
  /** Where the live line of tokenising goes. */
  readonly terminal?: Terminal | null;
}

export async function openTrainingData(
  config: Config,
  say: Say,
  warn: Say,
  options: OpenDataOptions = {},
): Promise<Loader> {
  const { source, path, synthetic_on_fail: mayReplace } = config.data;
  const isReplaceable = mayReplace && source !== 'synthetic';
  const replaceable = async (real: Loader | null) => {
    const synthetic = { ...config, data: { ...config.data, source: 'synthetic', path: null } } as const;
    return new FallbackLoader(real, await openLoader(synthetic, { ...options.rank }), source, warn);
  };
  try {
    const loader = await openSource(config, say, warn, options);
    const tokens = Number.isFinite(loader.tokensPerEpoch) ? `${loader.tokensPerEpoch} training tokens` : 'without end';
    const known = Number.isFinite(loader.validationSamples);
    const { sources } = config.data;
    if (sources !== null) for (const line of mixtureLines(sources)) say(line);
    say(
      `data: ${source}${path ? ` ${path}` : ''}, ${tokens}${known ? `, ${loader.validationSamples} validation samples` : ''}`,
    );
    return isReplaceable ? await replaceable(loader) : loader;
  } catch (error) {
    // A path or a dataset that does not exist is a mistake, which noise in its place would hide.
    if (!isReplaceable || !(error instanceof TrefoilError) || error instanceof UsageError) throw error;
    const loader = await replaceable(null);
    loader.fallBack(error);
    return loader;
  }
}

/** The weights of a mixture. How far they lead is what `trefoil data inspect` computes. */
function mixtureLines(sources: NonNullable<Config['data']['sources']>): string[] {
  return sources.map(({ name, source, path, weight, epochs }) => {
    const limit = path === null ? '' : `, at most ${plural(epochs, 'epoch')}`;
    return `data: ${name} ${Number((100 * weight).toFixed(2))} % of the tokens: ${source}${path === null ? '' : ` ${path}`}${limit}`;
  });
}

/** Waits until `warmup_batches` batches are ready. After the time limit it warns, and the run begins. */
export async function warmUp(loader: Loader, { data }: Config, warn: Say): Promise<void> {
  const { warmup_batches: batches, warmup_timeout: seconds } = data;
  if (batches === 0 || loader.ready === undefined) return;
  const stop = new AbortController();
  const late = sleep(1000 * seconds, true, { signal: stop.signal }).catch(() => false); // rejects only when aborted below
  const ready = loader.ready(batches).then(
    () => false,
    (error) => {
      // The first step will throw this error; here it only ends the wait.
      if (error instanceof TrefoilError) return false;
      throw error;
    },
  );
  const isLate = await Promise.race([ready, late]);
  stop.abort();
  if (isLate) warn(`data.warmup_batches: fewer than ${batches} batches were ready after ${seconds} s; starting`);
}

async function openSource(config: Config, say: Say, warn: Say, options: OpenDataOptions): Promise<Loader> {
  const { data } = config;
  const { environment, evaluate, rank } = options;
  const limit = new StallLimit(data.loader_timeout);
  const line = new TokenisingLine(say, data.report_docs, options.terminal ?? null);
  const loading = openLoader(config, {
    environment,
    evaluate,
    ...rank,
    onNotice: say,
    onWarning: warn,
    onProgress: (progress) => {
      limit.progress();
      line.show(progress);
    },
  });
  // A streamed source has time limits of its own, for every request.
  const isStreamed = isOneOf(STREAMED_SOURCES, data.source);
  try {
    return await (isStreamed ? loading : Promise.race([loading, limit.exceeded]));
  } finally {
    limit.end();
    line.clear();
  }
}

/** Progress of tokenising: a live line on a terminal, elsewhere a line every `every` documents. 0 disables both. */
class TokenisingLine {
  readonly #say: Say;
  readonly #every: number;
  readonly #live: LiveLine;
  readonly #started = performance.now();
  #reported = 0;

  constructor(say: Say, every: number, terminal: Terminal | null) {
    this.#say = say;
    this.#every = every;
    this.#live = new LiveLine(terminal);
  }

  show({ documents, tokens, bytes, parts, totalParts }: BuildProgress): void {
    if (this.#every === 0) return;
    const speed = bytes / 1e6 / Math.max(1e-3, (performance.now() - this.#started) / 1000);
    const text = `tokenised ${documents} documents, ${tokens} tokens, ${parts}/${totalParts} parts, ${speed.toFixed(1)} MB/s`;
    if (this.#live.isLive) this.#live.show(text);
    else if (documents - this.#reported >= this.#every) {
      this.#reported = documents;
      this.#say(text);
    }
  }

  clear(): void {
    this.#live.clear();
  }
}

/** Rejects after a number of seconds without progress. Preparing a large corpus may take longer than that in all. */
class StallLimit {
  readonly exceeded: Promise<never>;
  #last = performance.now();
  readonly #timer: NodeJS.Timeout;

  constructor(seconds: number) {
    let fail: (error: TrefoilError) => void;
    this.exceeded = new Promise((_, reject) => {
      fail = reject;
    });
    this.exceeded.catch(() => {}); // no-op handler, so that an unawaited rejection does not crash the process
    this.#timer = setInterval(
      () => {
        if (performance.now() - this.#last >= seconds * 1000) fail(silentSource(seconds));
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

/**
 * Gives synthetic tokens after `fallBack` (--synthetic-on-fail). The position is always that of the real source, so a run
 * that is resumed later continues where real data ended.
 */
class FallbackLoader implements Loader {
  readonly vocabSize: number;
  readonly tokensPerEpoch: number;
  readonly samplesPerEpoch: number;
  /** Null if it could not be opened. */
  readonly #real: Loader | null;
  readonly #synthetic: Loader;
  readonly #name: string;
  readonly #warn: Say;
  #replaced = false;
  /** The position of a source that could not be opened. */
  #position: object = BEGINNING;

  constructor(real: Loader | null, synthetic: Loader, name: string, warn: Say) {
    this.#real = real;
    this.#synthetic = synthetic;
    this.#name = name;
    this.#warn = warn;
    const { vocabSize, tokensPerEpoch, samplesPerEpoch } = real ?? synthetic;
    this.vocabSize = vocabSize;
    this.tokensPerEpoch = tokensPerEpoch;
    this.samplesPerEpoch = samplesPerEpoch;
  }

  fallBack(error: TrefoilError): void {
    if (this.#replaced) return;
    this.#replaced = true;
    this.#warn(
      `${error.message}; training on SYNTHETIC random tokens in place of ${this.#name}, because of --synthetic-on-fail`,
    );
  }

  get #current(): Loader {
    return this.#replaced ? this.#synthetic : this.#real!;
  }

  get source(): string {
    return this.#replaced ? 'synthetic' : this.#name;
  }

  /** 0 while the source is replaced: a loss on random tokens would look like a measurement. */
  get validationSamples(): number {
    return this.#replaced ? 0 : this.#real!.validationSamples;
  }

  async ready(batches: number): Promise<void> {
    await this.#current.ready?.(batches);
  }

  isReady(batches: number): boolean {
    return this.#current.isReady?.(batches) ?? true;
  }

  async readyToEvaluate(batches: number): Promise<void> {
    await this.#current.readyToEvaluate?.(batches);
  }

  next(): Batch {
    return this.#current.next();
  }

  telemetry(): LoaderTelemetry {
    return this.#real?.telemetry?.() ?? { documents: 0, bytes: 0, queueFill: 0 };
  }

  state(): object {
    return this.#real?.state() ?? this.#position;
  }

  restore(state: unknown): void {
    if (this.#real) this.#real.restore(state);
    else this.#position = state as object;
  }

  evalBatches(count: number): Iterable<Batch> {
    return this.#current.evalBatches(count);
  }

  close(): void {
    this.#real?.close();
    this.#synthetic.close();
  }
}
