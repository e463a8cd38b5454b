/** The data of a run: a time limit for its source, and synthetic tokens in place of a source that fails, if the config allows it. */
import { setTimeout as sleep } from 'node:timers/promises';
import { isOneOf, STREAMED_SOURCES } from '../config/data-sources.js';
import type { Config } from '../config/schema.js';
import type { Batch } from '../data/batch.js';
import { type BuildProgress, type Loader, type LoaderTelemetry, openLoader } from '../data/loader.js';
import { silentSource } from '../data/sources/http.js';
import type { Environment } from '../environment.js';
import { TrefoilError } from '../errors.js';
import { LiveLine, type Terminal } from '../live-line.js';

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
  /** What `evalBatches` covers: the validation part (default), or the whole source. */
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
  const openSynthetic = () =>
    openLoader({ ...config, data: { ...config.data, source: 'synthetic', path: null } }, { ...options.rank });
  try {
    const loader = await openSource(config, say, warn, options);
    const tokens = Number.isFinite(loader.tokensPerEpoch) ? `${loader.tokensPerEpoch} training tokens` : 'without end';
    const known = Number.isFinite(loader.validationSamples);
    say(
      `data: ${source}${path ? ` ${path}` : ''}, ${tokens}${known ? `, ${loader.validationSamples} validation samples` : ''}`,
    );
    if (!mayReplace || source === 'synthetic') return loader;
    return new FallbackLoader(loader, await openSynthetic(), (error) => warn(replacedLine(error)));
  } catch (error) {
    if (!(error instanceof TrefoilError) || !mayReplace || source === 'synthetic') throw error;
    warn(replacedLine(error));
    return await openSynthetic();
  }
}

function replacedLine(error: TrefoilError): string {
  return `${error.message}; training on SYNTHETIC random tokens instead, because of --synthetic-on-fail`;
}

/** Waits until `fwe_warmup_batches` batches are ready. After the time limit it warns, and the run begins. */
export async function warmUp(loader: Loader, { data }: Config, warn: Say): Promise<void> {
  const { fwe_warmup_batches: batches, fwe_warmup_timeout: seconds } = data;
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
  if (isLate) warn(`data.fwe_warmup_batches: fewer than ${batches} batches were ready after ${seconds} s; starting`);
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
 * Switches to synthetic tokens when its source fails (--synthetic-on-fail). The position is always that of the real source,
 * so a run that is resumed later continues where real data ended.
 */
class FallbackLoader implements Loader {
  readonly vocabSize: number;
  readonly tokensPerEpoch: number;
  readonly samplesPerEpoch: number;
  readonly #real: Loader;
  readonly #standIn: Loader;
  readonly #onReplaced: (error: TrefoilError) => void;
  #replaced = false;

  constructor(real: Loader, standIn: Loader, onReplaced: (error: TrefoilError) => void) {
    this.#real = real;
    this.#standIn = standIn;
    this.#onReplaced = onReplaced;
    this.vocabSize = real.vocabSize;
    this.tokensPerEpoch = real.tokensPerEpoch;
    this.samplesPerEpoch = real.samplesPerEpoch;
  }

  get source(): string | undefined {
    return this.#replaced ? this.#standIn.source : this.#real.source;
  }

  /** 0 while the source is replaced: a loss on random tokens would look like a measurement. */
  get validationSamples(): number {
    return this.#replaced ? 0 : this.#real.validationSamples;
  }

  async ready(batches: number): Promise<void> {
    if (this.#replaced) return;
    try {
      await this.#real.ready?.(batches);
    } catch (error) {
      this.#replace(error);
    }
  }

  isReady(batches: number): boolean {
    return this.#replaced || (this.#real.isReady?.(batches) ?? true);
  }

  async readyToEvaluate(batches: number): Promise<void> {
    await this.#real.readyToEvaluate?.(batches);
  }

  next(): Batch {
    if (!this.#replaced) {
      try {
        return this.#real.next();
      } catch (error) {
        this.#replace(error);
      }
    }
    return this.#standIn.next();
  }

  telemetry(): LoaderTelemetry {
    return this.#real.telemetry?.() ?? { documents: 0, bytes: 0, queueFill: 0 };
  }

  state(): object {
    return this.#real.state();
  }

  restore(state: unknown): void {
    this.#real.restore(state);
  }

  evalBatches(count: number): Iterable<Batch> {
    return this.#real.evalBatches(count);
  }

  close(): void {
    this.#real.close();
    this.#standIn.close();
  }

  #replace(error: unknown): void {
    if (!(error instanceof TrefoilError)) throw error;
    this.#replaced = true;
    this.#onReplaced(error);
  }
}
