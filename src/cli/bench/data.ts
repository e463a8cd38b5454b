/** `trefoil bench data`: measures whether the data path keeps up with the trainer. */
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { availableParallelism, cpus, tmpdir } from 'node:os';
import { join } from 'node:path';
import { parquetWriteBuffer } from 'hyparquet-writer';
import {
  localCorpus,
  measurePipeline,
  measurePrepared,
  measureTokenizerBaseline,
  measureWaits,
  openPipeline,
  openPrepared,
  type Rate,
} from '../../bench/data.js';
import { makeTexts, type TextKind } from '../../bench/data-texts.js';
import type { Loader } from '../../data/loader.js';
import { prepareCorpus } from '../../data/shards/prepare.js';
import type { CorpusSpec } from '../../data/sources/spec.js';
import { type Io, ProgressLine, printJson } from '../shared/io.js';
import { configured, flag, jsonOption, type OptionValues, parsed, wholeNumber } from '../shared/options.js';
import { formatTable, right, wrapped } from '../shared/table.js';

const OPTIONS = {
  localPath: flag('--local-path <path>', 'your own corpus instead of the generated web text'),
  textField: parsed('--text-field <name>', 'column or field that holds the text', String, 'text'),
  tokenizer: parsed('--tokenizer <name>', 'byte, gpt2, stories or the path of a tokenizer.json', String, 'gpt2'),
  workers: parsed('--workers <n>', 'threads that tokenise', wholeNumber(1), 2),
  rate: parsed('--rate <n>', 'tokens per second of the simulated trainer', wholeNumber(1), 600_000),
  quick: flag('--quick', 'less text and shorter measurements'),
  json: jsonOption(
    '{machine, workers, rate, rows: [{what, text, tokens_per_s, mb_per_s, mb_per_cpu_s, share, cpu_share, fetch_p50_ms, fetch_p95_ms}]}',
  ),
};
type Options = OptionValues<typeof OPTIONS>;

interface Row {
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

const SHAPE = { seq_len: 2048, batch_size: 8 };
const GROUP_DOCUMENTS = 250;
const FILES = 4;
const NOTHING = {
  mb_per_s: null,
  mb_per_cpu_s: null,
  share: null,
  cpu_share: null,
  fetch_p50_ms: null,
  fetch_p95_ms: null,
};

const HELP = `
prepared: batches from token shards. bare: the tokenizer alone on documents in
memory, with as many threads. pipeline: Parquet to batches. wait: how long a
trainer of --rate waits for a batch of ${SHAPE.batch_size} x ${SHAPE.seq_len}
tokens. Texts: web (generated sentences with the word frequencies of natural
text), markdown (our documentation), worst (letters without spaces, never
repeated). share and CPU: speed relative to bare, by the clock and by CPU time.
Rates are the better of two rounds (one with --quick).
`;

export const configure = configured(OPTIONS, bench, HELP);

async function bench(options: Options, io: Io): Promise<void> {
  const folder = mkdtempSync(join(tmpdir(), 'trefoil-bench-data-'));
  try {
    const progress = new ProgressLine(io);
    progress.show('making texts');
    const rows = await measure(options, folder, (text) => progress.show(text));
    progress.clear();
    const machine = `${cpus()[0]?.model ?? 'unknown'}, ${availableParallelism()} cores`;
    if (options.json) printJson(io, { machine, workers: options.workers, rate: options.rate, rows });
    else io.out(`${machine}; ${options.workers} workers\n\n${table(rows, io.width)}`);
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

async function measure(options: Options, folder: string, onProgress: (text: string) => void): Promise<Row[]> {
  const { tokenizer, workers, rate, quick = false } = options;
  const seconds = quick ? 0.2 : 4;
  const rows: Row[] = [];
  const add = (row: Row): void => {
    rows.push(row);
    onProgress(line(row));
  };
  const web = options.localPath ?? 'web';
  const corpora: [string, CorpusSpec][] = [
    [
      web,
      options.localPath ? await localCorpus(options.localPath, options.textField) : await made('web', folder, quick),
    ],
    ['markdown', await made('markdown', folder, quick)],
    ['worst', await made('worst', folder, quick)],
  ];
  for (const [text, spec] of corpora) {
    let [bare, pipeline] = [NO_RATE, NO_RATE];
    // Alternating, so that another process on the machine slows both down alike.
    for (let round = 0; round < (quick ? 1 : 2); round++) {
      onProgress(`${text}, round ${round + 1}: tokenizer, then pipeline`);
      bare = better(bare, await measureTokenizerBaseline(spec, tokenizer, workers, seconds));
      pipeline = better(pipeline, await measurePipeline(spec, tokenizer, workers, SHAPE, seconds));
    }
    const row = (what: Row['what'], rate: Rate) => ({
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
  const prepared = await openPrepared(shards, tokenizer, SHAPE);
  measurePrepared(prepared, seconds / 4);
  const fastest = Math.max(measurePrepared(prepared, seconds / 2), measurePrepared(prepared, seconds / 2));
  add({ what: 'prepared', text: web, ...NOTHING, tokens_per_s: fastest });
  const wait = async (what: Row['what'], loader: Loader): Promise<void> => {
    const { p50Ms, p95Ms } = await measureWaits(loader, rate, 2 * seconds);
    add({ what, text: web, ...NOTHING, tokens_per_s: rate, fetch_p50_ms: p50Ms, fetch_p95_ms: p95Ms });
    loader.close();
  };
  await wait('wait prepared', prepared);
  const stream = await openPipeline(corpora[0][1], tokenizer, workers, SHAPE);
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

/** Writes a few Parquet files of generated text. */
function made(kind: TextKind, folder: string, quick: boolean): Promise<CorpusSpec> {
  const path = join(folder, kind);
  mkdirSync(path);
  const bytes = (quick ? 1e6 : 32e6) / (kind === 'worst' ? 4 : 1);
  const texts = makeTexts(kind, bytes);
  for (let file = 0; file < FILES; file++) {
    const mine = texts.filter((_, index) => index % FILES === file);
    const columnData = [{ name: 'text', data: mine, type: 'STRING' as const }];
    const bytes = parquetWriteBuffer({ columnData, rowGroupSize: GROUP_DOCUMENTS, codec: 'UNCOMPRESSED' });
    writeFileSync(join(path, `${file}.parquet`), new Uint8Array(bytes));
  }
  return localCorpus(path);
}

function line(row: Row): string {
  const parts = [`${row.what} ${row.text}: ${million(row.tokens_per_s)} tokens/s`];
  if (row.mb_per_s !== null) parts.push(`${row.mb_per_s.toFixed(1)} MB/s`);
  if (row.mb_per_cpu_s !== null) parts.push(`${row.mb_per_cpu_s.toFixed(1)} MB per CPU second`);
  if (row.share !== null)
    parts.push(`${percent(row.share)} of the tokenizer alone (${percent(row.cpu_share)} by CPU time)`);
  if (row.fetch_p95_ms !== null)
    parts.push(`p50 ${row.fetch_p50_ms!.toFixed(2)} ms, p95 ${row.fetch_p95_ms.toFixed(2)} ms`);
  return parts.join(', ');
}

const percent = (share: number | null): string => (share === null ? '' : `${(100 * share).toFixed(0)} %`);
const million = (value: number): string => `${(value / 1e6).toFixed(2)}M`;

function table(rows: readonly Row[], width: number): string {
  const cell = (value: number | null, digits: number) => (value === null ? '' : value.toFixed(digits));
  return formatTable(
    ['what', wrapped('text'), ...right('tok/s', 'MB/s', 'MB/CPU s', 'share', 'CPU', 'p50 ms', 'p95 ms')],
    rows.map((row) => [
      ...[row.what, row.text, million(row.tokens_per_s), cell(row.mb_per_s, 1), cell(row.mb_per_cpu_s, 1)],
      ...[percent(row.share), percent(row.cpu_share)],
      ...[cell(row.fetch_p50_ms, 2), cell(row.fetch_p95_ms, 2)],
    ]),
    width,
  );
}
