/** `trefoil bench serve`: puts a server under load and measures latencies and throughput. */
import { readFileSync } from 'node:fs';
import { type Command, InvalidArgumentError } from 'commander';
import { loadServer, measureDecode, type Percentiles, type ServeResult } from '../../bench/serve.js';
import { UsageError } from '../../errors.js';
import { fileError } from '../../files.js';
import { WorkerHost } from '../../serve/host.js';
import { startServer } from '../../serve/server.js';
import { deviceOption, openDevice } from '../shared/device.js';
import { type Io, ProgressLine, printJson } from '../shared/io.js';
import {
  addOptions,
  flag,
  jsonOption,
  modelFlag,
  numberFrom,
  type OptionValues,
  parsed,
  threadsOption,
  wholeNumber,
} from '../shared/options.js';
import { formatTable, right } from '../shared/table.js';

const OPTIONS = {
  url: flag('--url <url>', 'server to measure, such as http://127.0.0.1:8080').conflicts('model'),
  model: modelFlag('--model <path>', 'start a server for this model, and also decode without a server'),
  apiKeyFile: flag('--api-key-file <file>', 'file whose first line is the key of the server'),
  requests: parsed('--requests <n>', 'number of requests', wholeNumber(1), 64),
  concurrency: parsed('--concurrency <n>', 'closed loop: clients, each with one request at a time', wholeNumber(1), 8),
  rate: parsed('--rate <x>', 'Poisson arrivals per second instead of a closed loop', numberFrom(0)),
  promptTokens: parsed('--prompt-tokens <a-b>', 'tokens of a prompt, drawn evenly', range, [64, 64], '64'),
  outputTokens: parsed('--output-tokens <a-b>', 'tokens of an answer, drawn evenly', range, [64, 64], '64'),
  sharedPrefix: parsed('--shared-prefix <n>', 'tokens that all prompts begin with', wholeNumber(0), 0),
  disconnect: parsed('--disconnect <p>', 'share of clients that disconnect at a random token', numberFrom(0), 0),
  seed: parsed('--seed <n>', 'seed of the load', wholeNumber(0), 1),
  maxBatch: parsed('--max-batch <n>', 'with --model: requests computed at the same time', wholeNumber(1), 32),
  maxQueued: parsed('--max-queued <n>', 'with --model: requests that may wait', wholeNumber(0), 256),
  device: deviceOption('with --model: where to compute'),
  threads: threadsOption(),
  json: jsonOption(
    '{requests, completed, refused, disconnected, failed, seconds, goodput, decode_tokens_per_s, …_ms, decode_ratio}',
  ),
};
type Options = OptionValues<typeof OPTIONS>;

export function configure(command: Command, io: Io): void {
  addOptions(command, OPTIONS)
    .addHelpText('after', HELP)
    .action((options: Options) => run(options, io));
}

const HELP = `
Prompts are random tokens, answers greedy and of exactly the drawn length.
goodput: generated tokens of completed requests per second. TTFT: time to the
first token. ITL: time between tokens. TPOT: mean time per token of a request.
decode: tokens per second while all requests decode; with --model also as a
share of the same model decoded without a server, at the same batch size.

Examples:
  trefoil bench serve --model artifacts/quickstart --concurrency 8
  trefoil bench serve --url http://127.0.0.1:8080 --rate 20 --requests 500
`;

async function run(options: Options, io: Io): Promise<void> {
  const { model, url } = options;
  if ((model === undefined) === (url === undefined)) throw new UsageError('give --url or --model');
  if (options.disconnect > 1) throw new UsageError('--disconnect: a share from 0 to 1');
  if (url !== undefined) {
    report(await load(url, options, io), null, options, io);
    return;
  }
  const [prompt] = options.promptTokens;
  const [tokens] = options.outputTokens;
  const batch = Math.min(options.concurrency, options.maxBatch);
  const alone = measureDecode(openDevice(options), model!, { batch, prompt: options.sharedPrefix + prompt, tokens });
  const unbounded = { maxQueued: Number.MAX_SAFE_INTEGER, maxQueuedTokens: Number.MAX_SAFE_INTEGER };
  const host = await WorkerHost.start(
    {
      model: model!,
      device: options.device,
      engine: { maxBatch: options.maxBatch, ...unbounded },
      ...(options.threads === undefined ? {} : { threads: options.threads }),
    },
    (line) => io.err(line),
  );
  try {
    const server = await startServer(host, { id: 'bench', port: 0, maxQueued: options.maxQueued });
    const result = await load(server.url, options, io);
    await server.drain(10);
    report(result, alone, options, io);
  } finally {
    await host.close();
  }
}

function load(url: string, options: Options, io: Io): Promise<ServeResult> {
  const { requests, concurrency, promptTokens, outputTokens, sharedPrefix, disconnect, seed, apiKeyFile } = options;
  const progress = new ProgressLine(io);
  const rate = options.rate === undefined || options.rate === 0 ? null : options.rate;
  const settings = { url, requests, concurrency, rate, promptTokens, outputTokens, sharedPrefix, disconnect, seed };
  return loadServer({ ...settings, key: apiKeyFile === undefined ? null : firstLine(apiKeyFile) }, (done) =>
    progress.show(`${done} of ${requests} requests`),
  ).finally(() => progress.clear());
}

function report(result: ServeResult, alone: number | null, { json }: Options, io: Io): void {
  const { decode_tokens_per_s: decode } = result;
  const ratio = alone === null ? {} : { decode_alone: alone, decode_ratio: decode === null ? null : decode / alone };
  if (json) {
    printJson(io, { ...result, ...ratio });
    return;
  }
  const { requests, completed, refused, disconnected, failed, seconds } = result;
  io.out(
    `${requests} requests in ${seconds.toFixed(1)} s: ${completed} completed, ${refused} refused (429), ` +
      `${disconnected} disconnected, ${failed} failed`,
  );
  const share = (rate: number) =>
    alone === null ? '' : `, ${(rate / alone).toFixed(3)} of ${alone.toFixed(0)} without a server`;
  // Not measured where requests did not all decode at the same time.
  const rate = decode === null ? '' : `, decode ${decode.toFixed(1)} tok/s${share(decode)}`;
  io.out(`goodput ${result.goodput.toFixed(1)} tok/s${rate}`);
  const row = (name: string, { p50, p99, max }: Percentiles) => [
    name,
    ...[p50, p99, max].map((ms) => (ms === null ? '–' : ms.toFixed(2))),
  ];
  const rows = [
    row('first byte', result.first_byte_ms),
    row('TTFT', result.ttft_ms),
    row('ITL', result.itl_ms),
    row('TPOT', result.tpot_ms),
    row('E2E', result.e2e_ms),
  ];
  io.out(formatTable([{ title: 'ms' }, ...right('p50', 'p99', 'max')], rows, io.width));
}

function firstLine(path: string): string {
  try {
    return readFileSync(path, 'utf8').split('\n')[0].trim();
  } catch (error) {
    throw fileError('read', path, error);
  }
}

/** `64` or `16-512` */
function range(text: string): readonly [number, number] {
  const [least, most = least] = text.split('-').map(Number);
  if (!Number.isSafeInteger(least) || !Number.isSafeInteger(most) || least < 1 || most < least)
    throw new InvalidArgumentError('It must be an integer >= 1, or two with a dash, such as 16-512.');
  return [least, most];
}
