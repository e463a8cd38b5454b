/** `trefoil dashboard`: serves the web application over the files of runs, and the playground of a model. */
import { basename, resolve } from 'node:path';
import { startDashboard } from '../dashboard/server.js';
import { isLoopback } from '../http/access.js';
import { WorkerHost } from '../serve/host.js';
import { resolveThresholds } from '../watch/thresholds.js';
import { deviceOption } from './shared/device.js';
import type { Io } from './shared/io.js';
import {
  configured,
  MODEL_PATH,
  modelFlag,
  type OptionValues,
  parsed,
  threadsOption,
  wholeNumber,
} from './shared/options.js';

export const DEFAULT_PORT = 7070;

const OPTIONS = {
  dir: parsed('--dir <folder>', 'run folder, or a folder that contains runs', String, 'artifacts'),
  port: parsed('--port <n>', 'port to listen on; 0 = any free port', wholeNumber(0), DEFAULT_PORT),
  host: parsed('--host <address>', 'address to listen on; any but loopback needs the token', String, '127.0.0.1'),
  model: modelFlag('--model <path>', `a model for the playground: ${MODEL_PATH}`),
  device: deviceOption('where the model computes'),
  threads: threadsOption(),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
The dashboard only reads the files of runs: it cannot slow or stop a training,
except with its buttons Halt and Save, which need the token printed at start.
With --model it also has a playground, which computes in this process. The
first line on stdout is the address. Ctrl-C ends it.

Reach it on another machine through a tunnel:
  ssh -L 7070:127.0.0.1:7070 MACHINE
then open http://localhost:7070 here.
`;

export const configure = configured(OPTIONS, run, HELP);

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
    // The channel to the training that started it would keep this process alive.
    if (process.connected) process.disconnect();
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
