/** `trefoil bench data`: measures whether the data path keeps up with the trainer. */
import { availableParallelism, cpus } from 'node:os';
import { BATCH, benchData, type DataRow } from '../../bench/data.js';
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

const HELP = `
prepared: batches from token shards. bare: the tokenizer alone on documents in
memory, with as many threads. pipeline: files to batches. wait: how long a
trainer of --rate waits for a batch of ${BATCH.batchSize} x ${BATCH.seqLen}
tokens. Texts, written as JSON Lines: web (generated sentences with the word
frequencies of natural text), markdown (our documentation), worst (letters
without spaces, never repeated); Parquet with --local-path. share and CPU: speed
relative to bare, by the clock and by CPU time. Rates are the better of two
rounds (one with --quick).
`;

export const configure = configured(OPTIONS, bench, HELP);

async function bench(options: Options, io: Io): Promise<void> {
  const { workers, rate, quick = false } = options;
  const progress = new ProgressLine(io);
  const show = (news: string | DataRow) => progress.show(typeof news === 'string' ? news : line(news));
  const rows = await benchData({ ...options, quick }, show);
  progress.clear();
  const machine = `${cpus()[0]?.model ?? 'unknown'}, ${availableParallelism()} cores`;
  if (options.json) printJson(io, { machine, workers, rate, rows });
  else io.out(`${machine}; ${workers} workers\n\n${table(rows, io.width)}`);
}

function line(row: DataRow): string {
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

function table(rows: readonly DataRow[], width: number): string {
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
