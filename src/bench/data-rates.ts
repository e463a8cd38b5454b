/** Speed of the data path: from prepared shards, from text files through the pipeline, and of the tokenizer alone. */
import { setTimeout as sleep } from 'node:timers/promises';
import { Worker } from 'node:worker_threads';
import { createLoader, type Loader } from '../data/loader.js';
import { failureOf } from '../data/pipeline/failure.js';
import { type BaselineTask, type FromWorker, WORKER_MODULE } from '../data/pipeline/messages.js';
import { StreamLoader } from '../data/pipeline/stream-loader.js';
import { BASELINE_BYTES } from '../data/pipeline/tokenizer-baseline.js';
import { openCorpus } from '../data/sources/corpus.js';
import type { CorpusSpec } from '../data/sources/spec.js';
import { quantile } from '../numbers.js';
import { workerFile } from '../worker-file.js';

export interface Rate {
  readonly tokensPerSecond: number;
  readonly megabytesPerSecond: number;
  /** Per second of CPU time of all threads, which other load on the machine does not change. */
  readonly megabytesPerCpuSecond: number;
}

export interface Wait {
  readonly p50Ms: number;
  readonly p95Ms: number;
}

/** The shape of a batch. */
export interface BatchShape {
  readonly seqLen: number;
  readonly batchSize: number;
}

export function openPrepared(folder: string, tokenizer: string, shape: BatchShape): Promise<Loader> {
  return createLoader({ source: 'tokens', path: folder, tokenizer, valFraction: 0, seed: 1, ...shape });
}

export function openPipeline(spec: CorpusSpec, tokenizer: string, workers: number, shape: BatchShape) {
  return new StreamLoader({
    spec,
    tokenizer,
    workers,
    documentBatch: 64,
    prefetch: true,
    queue: 8,
    timeout: 120,
    sequenceLength: shape.seqLen,
    batchSize: shape.batchSize,
  });
}

export function localCorpus(path: string, textField = 'text'): Promise<CorpusSpec> {
  return openCorpus({
    source: 'files',
    path,
    textField,
    shuffle: true,
    seed: 1,
    splitSeed: 1,
    valFraction: 0,
    timeoutSeconds: 60,
    hub: { dataset: '', configuration: null, split: '', revision: '' },
    cache: { folder: '', limitBytes: 0 },
    environment: {},
  });
}

/** Batches that are taken per wait, so that the consumer is not woken for every batch. */
const TAKEN_TOGETHER = 4;

/** Takes batches as fast as possible for a number of seconds; returns tokens per second. */
export function measurePrepared(loader: Loader, seconds: number): number {
  const end = performance.now() + 1000 * seconds;
  const started = performance.now();
  let tokens = 0;
  while (performance.now() < end) tokens += loader.next().inputs.length;
  return tokens / ((performance.now() - started) / 1000);
}

/** The maximum rate of the pipeline from files to batches, after a warm-up. */
export async function measurePipeline(
  spec: CorpusSpec,
  tokenizer: string,
  workers: number,
  shape: BatchShape,
  seconds: number,
): Promise<Rate> {
  const loader = await openPipeline(spec, tokenizer, workers, shape);
  try {
    const run = async (isOver: (seconds: number) => boolean) => {
      const [started, before, cpu] = [performance.now(), loader.telemetry().bytes, process.cpuUsage()];
      let tokens = 0;
      while (!isOver((performance.now() - started) / 1000)) {
        await loader.ready(TAKEN_TOGETHER);
        for (let batch = 0; batch < TAKEN_TOGETHER; batch++) tokens += loader.next().inputs.length;
      }
      const elapsed = (performance.now() - started) / 1000;
      const megabytes = (loader.telemetry().bytes - before) / 1e6;
      return {
        tokensPerSecond: tokens / elapsed,
        megabytesPerSecond: megabytes / elapsed,
        megabytesPerCpuSecond: megabytes / cpuSeconds(cpu),
      };
    };
    // The same warm-up as for the tokenizer alone: every thread has seen as much text.
    const size = spec.files.reduce((sum, file) => sum + file.size, 0);
    const corpus = workers * Math.min(BASELINE_BYTES, size);
    await run(() => loader.telemetry().bytes >= corpus);
    return await run((elapsed) => elapsed >= seconds);
  } finally {
    loader.close();
  }
}

/** The tokenizer alone on the same documents, already in memory as strings, in as many threads. */
export async function measureTokenizerBaseline(
  spec: CorpusSpec,
  tokenizer: string,
  workers: number,
  seconds: number,
): Promise<Rate> {
  const file = await workerFile(WORKER_MODULE);
  const go = new Int32Array(new SharedArrayBuffer(4));
  const threads = Array.from({ length: workers }, (_, worker) => {
    const workerData: BaselineTask = {
      kind: 'baseline',
      spec,
      tokenizer,
      seconds,
      worker,
      workers,
      go: go.buffer as SharedArrayBuffer,
    };
    return new Worker(file, { workerData });
  });
  const next = (thread: Worker): Promise<FromWorker> =>
    new Promise((resolve, reject) => {
      thread.once('message', resolve);
      thread.once('error', reject);
    });
  try {
    await Promise.all(threads.map(next));
    const results = threads.map(next);
    Atomics.store(go, 0, 1);
    Atomics.notify(go, 0);
    const cpu = process.cpuUsage();
    const total = { tokensPerSecond: 0, megabytesPerSecond: 0 };
    let megabytes = 0;
    for (const result of await Promise.all(results)) {
      if (result.kind === 'failed') throw failureOf(result);
      if (result.kind !== 'rate') continue;
      total.tokensPerSecond += result.tokens / result.seconds;
      total.megabytesPerSecond += result.bytes / 1e6 / result.seconds;
      megabytes += result.bytes / 1e6;
    }
    return { ...total, megabytesPerCpuSecond: megabytes / cpuSeconds(cpu) };
  } finally {
    await Promise.all(threads.map((thread) => thread.terminate()));
  }
}

/** CPU time of this process since a measurement. */
function cpuSeconds(since: NodeJS.CpuUsage): number {
  const { user, system } = process.cpuUsage(since);
  return (user + system) / 1e6;
}

/** Time that a trainer of a given speed waits for batches. Its computation is simulated by sleeping. */
export async function measureWaits(loader: Loader, tokensPerSecond: number, seconds: number): Promise<Wait> {
  const waitedMs: number[] = [];
  const end = performance.now() + 1000 * seconds;
  await loader.ready?.(1);
  let due = performance.now();
  while (performance.now() < end) {
    const asked = performance.now();
    await loader.ready?.(1);
    const { inputs } = loader.next();
    waitedMs.push(performance.now() - asked);
    // A consumer that is behind does not pause, so its mean speed stays as given.
    due += (1000 * inputs.length) / tokensPerSecond;
    const pause = due - performance.now();
    if (pause > 1) await sleep(pause);
  }
  return { p50Ms: quantile(waitedMs, 0.5), p95Ms: quantile(waitedMs, 0.95) };
}
