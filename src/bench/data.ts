/** `bench data`: whether the data path keeps up with a trainer, over several texts. */
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Loader } from '../data/loader.js';
import { prepareCorpus } from '../data/shards/prepare.js';
import type { CorpusSpec } from '../data/sources/spec.js';
import {
  localCorpus,
  measurePipeline,
  measurePrepared,
  measureTokenizerBaseline,
  measureWaits,
  openPipeline,
  openPrepared,
  type Rate,
} from './data-rates.js';
import { makeTexts, type TextKind } from './data-texts.js';

export interface DataBench {
  /** A corpus to measure instead of the generated web text. */
  readonly localPath?: string;
  readonly textField: string;
  readonly tokenizer: string;
  readonly workers: number;
  /** Tokens per second of the simulated trainer. */
  readonly rate: number;
  /** Less text and shorter measurements. */
  readonly quick: boolean;
}

/** One row of `bench data --json`. */
export interface DataRow {
  readonly what: 'prepared' | 'bare' | 'pipeline' | 'wait prepared' | 'wait pipeline';
  readonly text: string;
  readonly tokens_per_s: number;
  readonly mb_per_s: number | null;
  readonly mb_per_cpu_s: number | null;
  /** Speed relative to the tokenizer alone, by the clock and by CPU time. */
  readonly share: number | null;
  readonly cpu_share: number | null;
  readonly fetch_p50_ms: number | null;
  readonly fetch_p95_ms: number | null;
}

/** The shape of a batch. */
export const BATCH = { seqLen: 2048, batchSize: 8 };
const FILES = 4;
const NOTHING = {
  mb_per_s: null,
  mb_per_cpu_s: null,
  share: null,
  cpu_share: null,
  fetch_p50_ms: null,
  fetch_p95_ms: null,
};

type OnProgress = (news: string | DataRow) => void;

/** Calls `onProgress` with each row, and with what is measured next. */
export async function benchData(bench: DataBench, onProgress: OnProgress): Promise<DataRow[]> {
  const folder = mkdtempSync(join(tmpdir(), 'trefoil-bench-data-'));
  try {
    return await measure(bench, folder, onProgress);
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

async function measure(bench: DataBench, folder: string, onProgress: OnProgress): Promise<DataRow[]> {
  const { localPath, textField, tokenizer, workers, rate, quick } = bench;
  onProgress('making texts');
  const seconds = quick ? 0.2 : 4;
  const rows: DataRow[] = [];
  const add = (row: DataRow): void => {
    rows.push(row);
    onProgress(row);
  };
  const web = localPath ?? 'web';
  const corpora: [string, CorpusSpec][] = [
    [web, localPath ? await localCorpus(localPath, textField) : await made('web', folder, quick)],
    ['markdown', await made('markdown', folder, quick)],
    ['worst', await made('worst', folder, quick)],
  ];
  for (const [text, spec] of corpora) {
    let [bare, pipeline] = [NO_RATE, NO_RATE];
    // Alternating, so that another process on the machine slows both down alike.
    for (let round = 0; round < (quick ? 1 : 2); round++) {
      onProgress(`${text}, round ${round + 1}: tokenizer, then pipeline`);
      bare = better(bare, await measureTokenizerBaseline(spec, tokenizer, workers, seconds));
      pipeline = better(pipeline, await measurePipeline(spec, tokenizer, workers, BATCH, seconds));
    }
    const row = (what: DataRow['what'], rate: Rate) => ({
      what,
      text,
      ...NOTHING,
      tokens_per_s: rate.tokensPerSecond,
      mb_per_s: rate.megabytesPerSecond,
      mb_per_cpu_s: rate.megabytesPerCpuSecond,
    });
    const share = pipeline.megabytesPerSecond / bare.megabytesPerSecond;
    const cpu_share = pipeline.megabytesPerCpuSecond / bare.megabytesPerCpuSecond;
    add(row('bare', bare));
    add({ ...row('pipeline', pipeline), share, cpu_share });
  }
  const shards = join(folder, 'shards');
  await prepareCorpus({ spec: corpora[0][1], tokenizerName: tokenizer, workers, folder: shards });
  const prepared = await openPrepared(shards, tokenizer, BATCH);
  measurePrepared(prepared, seconds / 4);
  const fastest = Math.max(measurePrepared(prepared, seconds / 2), measurePrepared(prepared, seconds / 2));
  add({ what: 'prepared', text: web, ...NOTHING, tokens_per_s: fastest });
  const wait = async (what: DataRow['what'], loader: Loader): Promise<void> => {
    const { p50Ms, p95Ms } = await measureWaits(loader, rate, 2 * seconds);
    add({ what, text: web, ...NOTHING, tokens_per_s: rate, fetch_p50_ms: p50Ms, fetch_p95_ms: p95Ms });
    loader.close();
  };
  await wait('wait prepared', prepared);
  const stream = await openPipeline(corpora[0][1], tokenizer, workers, BATCH);
  await stream.ready(8);
  await wait('wait pipeline', stream);
  return rows;
}

const NO_RATE: Rate = { tokensPerSecond: 0, megabytesPerSecond: 0, megabytesPerCpuSecond: 0 };

function better(first: Rate, second: Rate): Rate {
  const { megabytesPerCpuSecond: one } = first;
  const { megabytesPerCpuSecond: two } = second;
  return {
    ...(first.megabytesPerSecond > second.megabytesPerSecond ? first : second),
    megabytesPerCpuSecond: Math.max(one, two),
  };
}

/** Writes a few files of generated text. */
function made(kind: TextKind, folder: string, quick: boolean): Promise<CorpusSpec> {
  const path = join(folder, kind);
  mkdirSync(path);
  const bytes = (quick ? 1e6 : 32e6) / (kind === 'worst' ? 4 : 1);
  const lines = makeTexts(kind, bytes).map((text) => `${JSON.stringify({ text })}\n`);
  for (let file = 0; file < FILES; file++)
    writeFileSync(join(path, `${file}.jsonl`), lines.filter((_, index) => index % FILES === file).join(''));
  return localCorpus(path);
}
