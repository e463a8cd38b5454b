/** Metrics of a server in the text format of Prometheus, with vLLM's names and meanings under `trefoil:`. */
import type { EngineStats } from '../infer/engine/interface.js';
import type { RequestUsage } from '../infer/engine/request.js';

const LATENCY = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160];
const TOKEN = [
  1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1, 2.5, 5,
];
const REQUEST = [
  0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
];

class Histogram {
  readonly #bounds: readonly number[];
  readonly #counts: number[];
  #sum = 0;
  #count = 0;

  constructor(bounds: readonly number[]) {
    this.#bounds = bounds;
    this.#counts = bounds.map(() => 0);
  }

  observe(value: number): void {
    this.#sum += value;
    this.#count += 1;
    const at = this.#bounds.findIndex((bound) => value <= bound);
    if (at >= 0) this.#counts[at] += 1;
  }

  get mean(): number {
    return this.#count === 0 ? 0 : this.#sum / this.#count;
  }

  lines(name: string): string[] {
    let total = 0;
    const buckets = this.#bounds.map((bound, i) => {
      total += this.#counts[i];
      return `${name}_bucket{le="${bound}"} ${total}`;
    });
    return [
      ...buckets,
      `${name}_bucket{le="+Inf"} ${this.#count}`,
      `${name}_sum ${this.#sum}`,
      `${name}_count ${this.#count}`,
    ];
  }
}

/** How a request ended, as `request_success_total` counts it. */
export type FinishedReason = 'stop' | 'length' | 'abort';

/** Counters and histograms of one server. */
export class Metrics {
  readonly #histograms = {
    time_to_first_token_seconds: new Histogram(LATENCY),
    inter_token_latency_seconds: new Histogram(TOKEN),
    e2e_request_latency_seconds: new Histogram(REQUEST),
    request_queue_time_seconds: new Histogram(REQUEST),
    request_prefill_time_seconds: new Histogram(REQUEST),
    request_decode_time_seconds: new Histogram(REQUEST),
  };
  readonly #finished: Record<FinishedReason, number> = { stop: 0, length: 0, abort: 0 };
  readonly #errors = new Map<string, number>();
  #promptTokens = 0;
  #generationTokens = 0;

  firstToken(seconds: number): void {
    this.#histograms.time_to_first_token_seconds.observe(seconds);
  }

  /** `count` tokens arrived `seconds` after those before them. */
  tokens(count: number, seconds: number): void {
    for (let i = 0; i < count; i++) this.#histograms.inter_token_latency_seconds.observe(seconds / count);
  }

  end(reason: FinishedReason, usage: RequestUsage, seconds: number): void {
    this.#finished[reason] += 1;
    this.#promptTokens += usage.promptTokens;
    this.#generationTokens += usage.newTokens;
    this.#histograms.e2e_request_latency_seconds.observe(seconds);
    this.#histograms.request_queue_time_seconds.observe(usage.queueSeconds);
    this.#histograms.request_prefill_time_seconds.observe(usage.prefillSeconds);
    this.#histograms.request_decode_time_seconds.observe(usage.decodeSeconds);
  }

  /** `code` is one of the program's own, never a text of the client. */
  error(code: string): void {
    this.#errors.set(code, (this.#errors.get(code) ?? 0) + 1);
  }

  /** Mean duration of a request, 0 before the first has ended. */
  get meanSeconds(): number {
    return this.#histograms.e2e_request_latency_seconds.mean;
  }

  text(stats: EngineStats): string {
    const lines: string[] = [];
    const add = (name: string, type: string, help: string, values: (full: string) => string[]) => {
      const full = `trefoil:${name}`;
      lines.push(`# HELP ${full} ${help}`, `# TYPE ${full} ${type}`, ...values(full));
    };
    const one = (name: string, type: string, help: string, value: number) =>
      add(name, type, help, (full) => [`${full} ${value}`]);
    one('num_requests_running', 'gauge', 'Requests that are computed.', stats.running);
    one('num_requests_waiting', 'gauge', 'Requests that wait.', stats.waiting);
    one('kv_cache_usage_perc', 'gauge', 'Reserved share of the cache, 0 to 1.', stats.reservedBytes / stats.cacheBytes);
    one('kv_cache_page_bytes', 'gauge', 'Bytes of all pages, cached prefixes included.', stats.pageBytes);
    one('prompt_tokens_total', 'counter', 'Tokens of prompts.', this.#promptTokens);
    one('generation_tokens_total', 'counter', 'Generated tokens.', this.#generationTokens);
    one('prefix_cache_queries_total', 'counter', 'Tokens looked up in the prefix cache.', stats.prefixQueries);
    one('prefix_cache_hits_total', 'counter', 'Tokens found in the prefix cache.', stats.prefixHits);
    one('prefix_cache_file_hits_total', 'counter', 'Tokens found in files of the prefix cache.', stats.prefixFileHits);
    one('prefix_cache_file_bytes', 'gauge', 'Bytes of the files of the prefix cache.', stats.prefixFileBytes);
    one('prefix_cache_files_damaged_total', 'counter', 'Damaged files that were deleted.', stats.prefixFilesDamaged);
    one('prefix_cache_file_errors_total', 'counter', 'Refusals of the file system.', stats.prefixFileErrors);
    one('spec_decode_num_draft_tokens_total', 'counter', 'Tokens that were guessed.', stats.draftTokens);
    one('spec_decode_num_accepted_tokens_total', 'counter', 'Guessed tokens that were right.', stats.acceptedTokens);
    add('request_success_total', 'counter', 'Requests that ended, by reason.', (full) =>
      Object.entries(this.#finished).map(([reason, count]) => `${full}{finished_reason="${reason}"} ${count}`),
    );
    add('request_errors_total', 'counter', 'Requests that were refused or failed, by code of the error.', (full) =>
      Array.from(this.#errors, ([code, count]) => `${full}{code="${code}"} ${count}`),
    );
    for (const [name, histogram] of Object.entries(this.#histograms))
      add(name, 'histogram', `${name.replaceAll('_', ' ')}.`, (full) => histogram.lines(full));
    return `${lines.join('\n')}\n`;
  }
}
