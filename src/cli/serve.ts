/** `trefoil serve`: serves a model over HTTP with the OpenAI API. */
import type { Command } from 'commander';
import { loadAssets } from '../dashboard/assets.js';
import { UsageError } from '../errors.js';
import { readGivenText } from '../files.js';
import { isHubName, parseHubName } from '../hub/name.js';
import { DEFAULT_MAX_CONTEXT } from '../infer/engine/request.js';
import { modelEnvironmentWarnings } from '../infer/environment.js';
import { serveModel } from '../serve/serve-model.js';
import { endLine, endWithin } from './shared/blocking.js';
import { deviceOption } from './shared/device.js';
import type { Io } from './shared/io.js';
import {
  adapterOption,
  addOptions,
  choice,
  flag,
  modelOption,
  numberFrom,
  type OptionValues,
  parsed,
  threadsOption,
  weightsOption,
  wholeNumber,
} from './shared/options.js';

const OPTIONS = {
  model: modelOption(),
  adapter: adapterOption(),
  name: flag('--name <id>', "the model's name in the API (default: name of the folder)"),
  host: parsed('--host <address>', 'address to listen on; other than loopback needs a key', String, '127.0.0.1'),
  port: parsed('--port <n>', 'port to listen on; 0 takes a free one', wholeNumber(0), 8080),
  apiKey: flag('--api-key <key>', 'key that clients must send').conflicts('apiKeyFile'),
  apiKeyFile: flag('--api-key-file <file>', 'file with accepted keys, one per line'),
  device: deviceOption('where to compute'),
  precision: choice('--precision <name>', 'type of activations (default: bf16 on CUDA, else fp32)', ['fp32', 'bf16']),
  weights: weightsOption(),
  threads: threadsOption(),
  maxContext: parsed(
    '--max-context <n>',
    'maximum tokens of a request, prompt included',
    wholeNumber(2),
    DEFAULT_MAX_CONTEXT,
  ),
  maxBatch: parsed('--max-batch <n>', 'requests that are computed at the same time', wholeNumber(1), 32),
  maxQueued: parsed('--max-queued <n>', 'requests that may wait; more get status 429', wholeNumber(0), 256),
  tile: parsed('--tile <n>', 'tokens of prompts that one step reads (default: 256, on CUDA 2048)', wholeNumber(1)),
  cacheGb: parsed(
    '--cache-gb <x>',
    'memory for running requests (default: at most half of what is free)',
    numberFrom(0),
  ),
  prefixCacheGb: parsed(
    '--prefix-cache-gb <x>',
    'memory for prefixes of earlier requests; 0 = off (default: 1, at most a quarter of what is free)',
    numberFrom(0),
  ),
  prefixCacheDir: flag('--prefix-cache-dir <folder>', 'folder for prefixes that survive a restart (default: none)'),
  prefixCacheDirGb: parsed('--prefix-cache-dir-gb <x>', 'size of that folder', numberFrom(0), 16),
  speculate: parsed(
    '--speculate <n>',
    'guess up to n tokens from the text and check them at once; 0 = off',
    wholeNumber(0),
    0,
  ),
  chatTemplate: flag('--chat-template <file>', "Jinja template of chats (default: the model's own)"),
  corsOrigin: flag('--cors-origin <origin>', 'origin that browsers may call from; * = any (default: none)'),
  drain: parsed(
    '--drain <s>',
    'seconds until the process ends after SIGTERM, for running requests',
    wholeNumber(0),
    30,
  ),
};
type Options = OptionValues<typeof OPTIONS>;

export function configure(command: Command, io: Io): void {
  addOptions(command, OPTIONS)
    .addHelpText('after', HELP)
    .action((options: Options) => run(options, io));
}

const HELP = `
The server listens at once and answers 503 until the model is ready. Then stdout
gets its first line, "listening on http://HOST:PORT", and one line of JSON per
request. Everything else goes to stderr. SIGTERM and SIGINT stop accepting,
finish what runs, and exit with 0.

Routes: /v1/completions /v1/chat/completions /v1/models /tokenize /detokenize
/health /metrics, and / with a playground for browsers. docs/guide/serve.md
shows clients, proxies and services.

Examples:
  trefoil serve --model artifacts/quickstart
  trefoil serve --model model/ --host 0.0.0.0 --api-key-file keys.txt
`;

const GB = 2 ** 30;

async function run(options: Options, io: Io): Promise<void> {
  for (const warning of modelEnvironmentWarnings(io.env, 'serve')) io.warn(warning);
  const { model, maxContext, maxBatch, maxQueued, tile, cacheGb, prefixCacheGb, prefixCacheDir } = options;
  const keys = readKeys(options);
  // The folder of a snapshot is called after its commit.
  const name = options.name ?? (isHubName(model) ? parseHubName(model).repository : undefined);
  const chatTemplate = options.chatTemplate === undefined ? {} : { chatTemplate: readGivenText(options.chatTemplate) };
  if (options.host !== '127.0.0.1' && options.apiKey !== undefined)
    io.warn('--api-key is visible to other users of this machine in the list of processes: use --api-key-file');
  let isReady = false;
  const server = await serveModel(model, {
    ...(name === undefined ? {} : { id: name }),
    host: options.host,
    port: options.port,
    keys,
    maxQueued,
    ...chatTemplate,
    ...(options.corsOrigin === undefined ? {} : { corsOrigin: options.corsOrigin }),
    pages: loadAssets(keys.length > 0 ? ['model', 'key'] : ['model']),
    log: (line) => (isReady ? io.out(line) : io.err(line)),
    say: (line) => io.err(line),
    device: options.device,
    ...(options.threads === undefined ? {} : { threads: options.threads }),
    weights: options.weights,
    ...(options.adapter === undefined ? {} : { adapter: options.adapter }),
    ...(options.precision === undefined ? {} : { precision: options.precision }),
    engine: {
      maxContext,
      maxBatch,
      ...(tile === undefined ? {} : { tile }),
      ...(cacheGb === undefined ? {} : { cacheBytes: cacheGb * GB }),
      ...(prefixCacheGb === undefined ? {} : { prefixCacheBytes: prefixCacheGb * GB }),
      ...(prefixCacheDir === undefined ? {} : { prefixCacheDir }),
      prefixCacheDirBytes: options.prefixCacheDirGb * GB,
      speculate: options.speculate,
    },
  });
  isReady = true;
  io.out(`listening on ${server.url}`);
  await stopSignal(options.drain);
  io.err(`draining: no new requests; up to ${options.drain} s for those under way; a second signal ends them`);
  await server.close(options.drain - Math.min(1, options.drain / 10)); // the rest of the time is for the model's thread
}

/** Seconds that the process has in any case: it frees memory and writes files of prefixes. */
const MIN_END_SECONDS = 2;

/** Resolves at SIGTERM or SIGINT, after which the process ends in time even if a thread hangs. A second signal ends it at once. */
function stopSignal(drain: number): Promise<void> {
  return new Promise((resolve) => {
    const seconds = Math.max(drain, MIN_END_SECONDS);
    const stop = () => {
      process.off('SIGTERM', stop);
      process.off('SIGINT', stop);
      // Where there is no compiler for the native deadline.
      setTimeout(() => process.kill(process.pid, 'SIGKILL'), 1000 * (seconds + 1)).unref();
      resolve();
    };
    process.on('SIGTERM', stop);
    process.on('SIGINT', stop);
    endWithin(seconds, endLine(`a thread did not end within ${seconds} s: the process ends without it`));
  });
}

function readKeys({ apiKey, apiKeyFile }: Options): string[] {
  if (apiKey !== undefined) return [apiKey];
  if (apiKeyFile === undefined) return [];
  const text = readGivenText(apiKeyFile);
  const keys = text.split(/\r?\n/).map((line) => line.trim());
  const given = keys.filter((line) => line !== '');
  if (given.length === 0) throw new UsageError(`${apiKeyFile}: holds no key; write one per line`);
  return given;
}
