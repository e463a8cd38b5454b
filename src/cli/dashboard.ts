/** `trefoil dashboard`: serves the web application over the files of runs. */
import { type Command, Option } from 'commander';
import { isLoopback } from '../dashboard/security.js';
import { startDashboard } from '../dashboard/server.js';
import { resolveThresholds } from '../watch/thresholds.js';
import type { Io } from './shared/io.js';
import { wholeNumber } from './shared/options.js';

interface Options {
  readonly dir: string;
  readonly host: string;
  readonly port: number;
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
    .addHelpText('after', HELP)
    .action((options: Options) => run(options, io));
}

const HELP = `
The dashboard only reads the files of runs: it cannot slow or stop a training,
except with its buttons Halt and Save, which need the token printed at start.
The first line on stdout is the address. Ctrl-C ends it.

Reach it on another machine through a tunnel:
  ssh -L 7070:127.0.0.1:7070 MACHINE
then open http://localhost:7070 here.
`;

async function run({ dir, host, port }: Options, io: Io): Promise<void> {
  const dashboard = await startDashboard({ dir, host, port, thresholds: resolveThresholds(io.env) });
  io.out(`listening on ${dashboard.url}`);
  if (isLoopback(host)) io.out(`token for halt and save: ${dashboard.token}`);
  else io.out(`open ${dashboard.url}/?token=${dashboard.token}`);
  await new Promise<void>((resolve) => {
    for (const signal of ['SIGINT', 'SIGTERM'] as const) process.once(signal, () => resolve());
  });
  await dashboard.close();
}
