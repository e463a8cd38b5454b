/** `trefoil serve`: serves a model over HTTP with the OpenAI API. */
import { readFileSync } from 'node:fs';
import { basename, resolve } from 'node:path';
import { type Command, InvalidArgumentError, Option } from 'commander';
import { environmentWarnings } from '../config/legacy/environment.js';
import { UsageError } from '../errors.js';
import { DEFAULT_MAX_CONTEXT } from '../infer/generate.js';
import { fileError } from '../run/atomic.js';
import { loadChatTemplate } from '../serve/chat-template.js';
import { WorkerHost } from '../serve/host.js';
import { startServer } from '../serve/server.js';
import { type DeviceChoice, deviceOption } from './shared/device.js';
import type { Io } from './shared/io.js';
import { threadsOption, wholeNumber } from './shared/options.js';

interface Options {
  readonly model: string;
  readonly name?: string;
  readonly host: string;
  readonly port: number;
  readonly apiKey?: string;
  readonly apiKeyFile?: string;
  readonly device: DeviceChoice;
  readonly precision?: 'fp32' | 'bf16';
  readonly threads?: number;
  readonly maxContext: number;
  readonly maxBatch: number;
  readonly maxQueued: number;
  readonly tile?: number;
  readonly cacheGb?: number;
  readonly prefixCacheGb?: number;
  readonly chatTemplate?: string;
  readonly corsOrigin?: string;
  readonly drain: number;
}

export function configure(command: Command, io: Io): void {
  const whole = (flags: string, meaning: string, least: number) =>
    new Option(flags, meaning).argParser(wholeNumber(least));
  const gigabytes = (flags: string, meaning: string) => new Option(flags, meaning).argParser(positive);
  command
    .requiredOption('--model <path>', 'run folder, checkpoint folder, or model.safetensors with its config.json')
    .option('--name <id>', "the model's name in the API (default: name of the folder)")
    .option('--host <address>', 'address to listen on; other than loopback needs a key', '127.0.0.1')
    .addOption(whole('--port <n>', 'port to listen on; 0 takes a free one', 0).default(8080))
    .addOption(new Option('--api-key <key>', 'key that clients must send').conflicts('apiKeyFile'))
    .option('--api-key-file <file>', 'file with accepted keys, one per line')
    .addOption(deviceOption('where to compute'))
    .addOption(
      new Option('--precision <name>', 'type of activations (default: bf16 on CUDA, else fp32)').choices([
        'fp32',
        'bf16',
      ]),
    )
    .addOption(threadsOption())
    .addOption(
      whole('--max-context <n>', 'maximum tokens of a request, prompt included', 2).default(DEFAULT_MAX_CONTEXT),
    )
    .addOption(whole('--max-batch <n>', 'requests that are computed at the same time', 1).default(32))
    .addOption(whole('--max-queued <n>', 'requests that may wait; more get status 429', 0).default(256))
    .addOption(whole('--tile <n>', 'tokens of prompts that one step reads (default: 256, on CUDA 2048)', 1))
    .addOption(gigabytes('--cache-gb <x>', 'memory for running requests (default: at most half of the free memory)'))
    .addOption(gigabytes('--prefix-cache-gb <x>', 'memory for prefixes of earlier requests; 0 = off (default: 1)'))
    .option('--chat-template <file>', "Jinja template of chats (default: the model's own)")
    .option('--cors-origin <origin>', 'origin that browsers may call from; * = any (default: none)')
    .addOption(whole('--drain <s>', 'seconds that requests may take to end after SIGTERM', 0).default(30))
    .addHelpText('after', HELP)
    .action((options: Options) => run(options, io));
}

const HELP = `
The first line on stdout is "listening on http://HOST:PORT", printed when the
model is ready; then one line of JSON per request. Everything else goes to
stderr. SIGTERM and SIGINT stop accepting, finish what runs, and exit with 0.

Routes: /v1/completions /v1/chat/completions /v1/models /tokenize /detokenize
/health /metrics. docs/guide/serve.md shows clients, proxies and services.

Examples:
  trefoil serve --model artifacts/quickstart
  trefoil serve --model model/ --host 0.0.0.0 --api-key-file keys.txt
`;

const GB = 2 ** 30;

async function run(options: Options, io: Io): Promise<void> {
  for (const warning of environmentWarnings(io.env)) io.warn(warning);
  const { model, maxContext, maxBatch, maxQueued, tile, cacheGb, prefixCacheGb } = options;
  const keys = readKeys(options);
  const template = loadChatTemplate(model, options.chatTemplate);
  if (options.host !== '127.0.0.1' && options.apiKey !== undefined)
    io.warn('--api-key is visible to other users of this machine in the list of processes: use --api-key-file');
  const host = await WorkerHost.start(
    {
      ...{ model, device: options.device },
      ...(options.threads === undefined ? {} : { threads: options.threads }),
      ...(options.precision === undefined ? {} : { precision: options.precision }),
      engine: {
        // The server bounds the queue; the engine takes what it accepted.
        ...{ maxContext, maxBatch, maxQueued: Number.MAX_SAFE_INTEGER, maxQueuedTokens: Number.MAX_SAFE_INTEGER },
        ...(tile === undefined ? {} : { tile }),
        ...(cacheGb === undefined ? {} : { cacheBytes: cacheGb * GB }),
        ...(prefixCacheGb === undefined ? {} : { prefixCacheBytes: prefixCacheGb * GB }),
      },
    },
    (line) => io.err(line),
  );
  try {
    const server = await startServer(host, {
      ...{
        id: options.name ?? basename(resolve(model)),
        host: options.host,
        port: options.port,
        keys,
        maxQueued,
        template,
      },
      ...(options.corsOrigin === undefined ? {} : { corsOrigin: options.corsOrigin }),
      log: (line) => io.out(line),
    });
    io.out(`listening on ${server.url}`);
    await stopSignal();
    io.err(`draining: no new requests; up to ${options.drain} s for those under way`);
    await server.drain(options.drain);
  } finally {
    await host.close();
  }
}

/** Resolves at SIGTERM or SIGINT. A second signal ends the process at once. */
function stopSignal(): Promise<void> {
  return new Promise((resolve) => {
    const stop = () => {
      process.off('SIGTERM', stop);
      process.off('SIGINT', stop);
      resolve();
    };
    process.on('SIGTERM', stop);
    process.on('SIGINT', stop);
  });
}

function readKeys({ apiKey, apiKeyFile }: Options): string[] {
  if (apiKey !== undefined) return [apiKey];
  if (apiKeyFile === undefined) return [];
  let text: string;
  try {
    text = readFileSync(apiKeyFile, 'utf8');
  } catch (error) {
    throw fileError('read', apiKeyFile, error);
  }
  const keys = text.split(/\r?\n/).map((line) => line.trim());
  const given = keys.filter((line) => line !== '');
  if (given.length === 0) throw new UsageError(`${apiKeyFile}: holds no key; write one per line`);
  return given;
}

function positive(text: string): number {
  const value = Number(text);
  if (text.trim() === '' || !(Number.isFinite(value) && value >= 0))
    throw new InvalidArgumentError('It must be a number >= 0.');
  return value;
}
