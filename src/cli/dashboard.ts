/** `trefoil dashboard`: serves the web application over the files of runs, and the playground of a model. */
import { basename, resolve } from 'node:path';
import { type Command, Option } from 'commander';
import { isLoopback } from '../dashboard/security.js';
import { startDashboard } from '../dashboard/server.js';
import { WorkerHost } from '../serve/host.js';
import { resolveThresholds } from '../watch/thresholds.js';
import { type DeviceChoice, deviceOption } from './shared/device.js';
import type { Io } from './shared/io.js';
import { threadsOption, wholeNumber } from './shared/options.js';

interface Options {
  readonly dir: string;
  readonly host: string;
  readonly port: number;
  readonly model?: string;
  readonly device: DeviceChoice;
  readonly threads?: number;
}

export const DEFAULT_PORT = 7070;

export function configure(command: Command, io: Io): void {
  command
    .addOption(new Option('--dir <folder>', 'run folder, or a folder that contains runs').default('artifacts'))
    .addOption(
      new Option('--port <n>', 'port to listen on; 0 = any free port').argParser(wholeNumber(0)).default(DEFAULT_PORT),
    )
    .addOption(
      new Option('--host <address>', 'address to listen on; any but loopback needs the token').default('127.0.0.1'),
    )
    .option('--model <path>', 'a model for the playground: run folder, checkpoint or model.safetensors')
    .addOption(deviceOption('where the model computes'))
    .addOption(threadsOption())
    .addHelpText('after', HELP)
    .action((options: Options) => run(options, io));
}

const HELP = `
The dashboard only reads the files of runs: it cannot slow or stop a training,
except with its buttons Halt and Save, which need the token printed at start.
With --model it also has a playground, which computes in this process. The
first line on stdout is the address. Ctrl-C ends it.

Reach it on another machine through a tunnel:
  ssh -L 7070:127.0.0.1:7070 MACHINE
then open http://localhost:7070 here.
`;

async function run(options: Options, io: Io): Promise<void> {
  const { dir, host, port } = options;
  const model = await startModel(options, io);
  try {
    const thresholds = resolveThresholds(io.env);
    const dashboard = await startDashboard({
      dir,
      host,
      port,
      thresholds,
      ...(model ? { model } : {}),
    });
    io.out(`listening on ${dashboard.url}`);
    if (isLoopback(host)) io.out(`token for halt and save: ${dashboard.token}`);
    else io.out(`open ${dashboard.url}/?token=${dashboard.token}`);
    await new Promise<void>((end) => {
      for (const signal of ['SIGINT', 'SIGTERM'] as const) process.once(signal, () => end());
      // Started beside a training: ends with it, even if it was killed.
      process.once('disconnect', () => end());
    });
    await dashboard.close();
  } finally {
    await model?.host.close();
  }
}

async function startModel({ model, device, threads }: Options, io: Io) {
  if (model === undefined) return undefined;
  const settings = {
    model,
    device,
    engine: {},
    ...(threads === undefined ? {} : { threads }),
  };
  return { host: await WorkerHost.start(settings, (line) => io.err(line)), id: basename(resolve(model)) };
}
