/** `trefoil launch`: starts the ranks of this machine, and restarts them when one is lost. */
import { randomUUID } from 'node:crypto';
import { fileURLToPath } from 'node:url';
import { type Command, InvalidArgumentError } from 'commander';
import { loadConfig, pickConfigByGpuMemory } from '../config/load.js';
import { cpuSockets } from '../device/cpu/sockets.js';
import { cudaAbsence, gpuCount } from '../device/cuda/cuda.js';
import { ExitCode, UsageError } from '../errors.js';
import { modelLayer, resumedLayer } from '../infer/model-layer.js';
import { pidExists } from '../process-identity.js';
import { readRun } from '../run/reader.js';
import { plural } from '../text.js';
import { petNode } from '../train/ranks/identity.js';
import {
  freePort,
  type Launched,
  launchProcesses,
  launchWithMpirun,
  NoMpirun,
  type Rendezvous,
} from '../train/ranks/launch.js';
import { createSecret } from '../train/ranks/secret.js';
import { pullInitialModel } from './shared/hub-models.js';
import type { Io } from './shared/io.js';
import { addOptions, type OptionValues, parsed, wholeNumber } from './shared/options.js';
import { parseTrainFlags } from './shared/train-flags.js';
import { gpuMemoryGib } from './train.js';

const DESCRIPTION = `Starts the ranks of a training run on this machine: through mpirun on CPUs, as
one process per GPU otherwise. Output lines are prefixed with their rank.
SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 are forwarded to all ranks; a closed
terminal counts as SIGTERM.`;

const RANKS =
  'ranks on this machine, or auto: one per GPU, else per CPU socket (default: PET_NPROC_PER_NODE, if set, or auto)';
const RESTARTS = 'restarts with --resume auto when a rank fails or is lost (default: 0)';

const OPTIONS = {
  nprocPerNode: parsed('-n, --nproc-per-node <ranks>', RANKS, ranksOrAuto),
  restarts: parsed('--restarts <r>', RESTARTS, wholeNumber(0)),
  maxRestarts: parsed('--max-restarts <r>', 'same as --restarts', wholeNumber(0)),
  // As torchrun spells them.
  nproc_per_node: parsed('--nproc_per_node <ranks>', RANKS, ranksOrAuto).hideHelp(),
  max_restarts: parsed('--max_restarts <r>', RESTARTS, wholeNumber(0)).hideHelp(),
};
type Options = OptionValues<typeof OPTIONS>;

function ranksOrAuto(text: string): number | 'auto' {
  if (text === 'auto') return text;
  if (!/^[1-9]\d*$/.test(text)) throw new InvalidArgumentError('It must be an integer >= 1, or auto.');
  return Number(text);
}

const HELP = `
train.batch_size is per rank: a step takes
batch_size * accumulate_grad_batches * ranks sequences.
For several machines use mpirun, torchrun, Slurm or Kubernetes
(docs/guide/several-gpus.md). Exit code: that of the ranks.

Example:
  trefoil launch -n 2 --restarts 3 -- train --config quickstart
`;

export function configure(command: Command, io: Io): void {
  addOptions(command, OPTIONS)
    .usage('[-n <ranks>] [--restarts <r>] [--] train [options]')
    .description(DESCRIPTION)
    .addHelpText('after', HELP)
    .passThroughOptions() // flags after `train` are those of the ranks
    .argument('[command...]')
    .action(async (words: readonly string[], options: Options) => {
      io.exitCode = await run(words, options, io);
    });
}

interface Request {
  readonly ranks: number;
  /** How the number of ranks was found, for the first line; empty if it was given. */
  readonly why: string;
  readonly restarts: number;
  /** Flags of train. */
  readonly words: readonly string[];
}

async function run([name, ...words]: readonly string[], options: Options, io: Io): Promise<number> {
  if (name !== 'train')
    throw new UsageError('launch: command missing; write trefoil launch [-n <ranks>] -- train [options]');
  if (words.includes('--help') || words.includes('-h'))
    throw new UsageError('launch: the flags of train are listed by trefoil train --help');
  const line = parseTrainFlags(words);
  if (line.resume === null) await pullInitialModel(line.layer, io);
  const { config, origins } = loadConfig({
    env: io.env,
    flags: line.layer,
    config: line.config,
    otherwise: pickConfigByGpuMemory(gpuMemoryGib(line.layer.get('runtime.device')?.value)),
    modelLayer: line.resume === null ? modelLayer : resumedLayer,
  });
  const { device } = config.runtime;
  const isCuda = device !== 'cpu' && cudaAbsence() === null;
  if (device === 'cuda' && !isCuda) throw new UsageError(`--device cuda: ${cudaAbsence()} (or use --device cpu)`);
  const given = options.nprocPerNode ?? options.nproc_per_node ?? petNode(io.env)?.perNode ?? 'auto';
  const ranks = given !== 'auto' ? given : isCuda ? gpuCount() : cpuSockets();
  const why = given === 'auto' ? ` (one per ${isCuda ? 'GPU' : 'CPU socket'})` : '';
  if (config.train.ddp === 0 && ranks > 1)
    throw new UsageError(
      `train.ddp: 0 trains on one rank, but launch starts ${ranks}; leave out one of the two [${origins.get('train.ddp')}]`,
    );
  const restarts = options.restarts ?? options.maxRestarts ?? options.max_restarts ?? 0;
  const request = { ranks, why, restarts, words };
  return await launch(request, { isCuda, outDir: config.train.out_dir, json: line.json }, io);
}

interface Place {
  readonly isCuda: boolean;
  readonly outDir: string;
  readonly json: boolean;
}

async function launch(request: Request, place: Place, io: Io): Promise<number> {
  io.isLog = true;
  let running: Launched | null = null;
  let isAsked = false;
  const handlers = (['SIGTERM', 'SIGINT', 'SIGHUP', 'SIGUSR1', 'SIGUSR2'] as const).map((name) => {
    const handler = () => {
      const isHangup = name === 'SIGHUP';
      if (isHangup && !io.stdout.isTTY && !io.stderr.isTTY) return; // as train does: under nohup the ranks go on
      isAsked ||= isHangup || name === 'SIGTERM' || name === 'SIGINT';
      running?.signal(isHangup ? 'SIGTERM' : name); // the ranks write to pipes and would ignore SIGHUP
    };
    process.on(name, handler);
    return () => process.off(name, handler);
  });
  try {
    for (let attempt = 0; ; attempt++) {
      running = await start(request, attempt > 0, () => isAsked, place, io);
      const code = await running.ended;
      if (code !== 0) for (const lost of lostRanks(place.outDir)) io.err(`launch: ${lost}`);
      if (isAsked || attempt >= request.restarts || !isRestartable(code)) return code;
      io.err(`launch: the ranks exited with ${code}; restarting (${attempt + 1} of ${request.restarts})`);
    }
  } catch (error) {
    if (!(error instanceof NoMpirun)) throw error;
    throw new UsageError(
      'launch: mpirun not found, which starts ranks on CPUs: install Open MPI ' +
        '(Debian and Ubuntu: apt-get install openmpi-bin libopenmpi3; macOS: brew install open-mpi)',
    );
  } finally {
    for (const off of handlers) off();
  }
}

/** Bad usage, .HALT, a signal and a non-finite loss would occur again: restarting does not help. */
function isRestartable(code: number): boolean {
  const final: readonly number[] = [
    ...[ExitCode.done, ExitCode.usage, ExitCode.halted, ExitCode.signalled, ExitCode.nonFinite],
  ];
  return !final.includes(code);
}

async function start(
  request: Request,
  isAgain: boolean,
  isAsked: () => boolean,
  { isCuda, json }: Place,
  io: Io,
): Promise<Launched> {
  const main = fileURLToPath(new URL('./main.js', import.meta.url));
  const words = isAgain ? withResume(request.words) : request.words;
  const node = petNode(io.env);
  const { ranks, why } = request;
  const usesMpi = !isCuda && ranks > 1;
  const onLine = (line: string, rank: number | null, isError: boolean) => {
    if (json && !isError && rank === 0) io.out(line);
    // After a stop that was asked for, mpirun reports the exit codes of the ranks as a failure.
    else if (!(rank === null && isAsked())) (isError || json ? io.err : io.out)(`[${rank ?? 'mpirun'}] ${line}`);
  };
  const options = { ranks, command: [process.execPath, main, 'train', ...words], env: io.env, onLine };
  // Seconds may pass until the first rank prints.
  io.err(`launch: starting ${plural(ranks, 'rank')}${why}${usesMpi ? ' with mpirun' : ''}`);
  if (!isCuda && node && node.nodes > 1)
    throw new UsageError('PET_NNODES: start CPU ranks on several machines with mpirun instead of launch');
  if (usesMpi) return launchWithMpirun(options);
  const meet: Rendezvous = node
    ? {
        world: node.nodes * ranks,
        firstRank: node.nodeRank * ranks,
        address: node.masterAddress,
        port: node.masterPort,
        runId: io.env['PET_RDZV_ID'] ?? 'kubeflow',
        secret: node.nodes > 1 ? null : createSecret(), // several nodes need the same one
      }
    : {
        world: ranks,
        firstRank: 0,
        address: '127.0.0.1',
        port: await freePort(),
        runId: randomUUID(),
        secret: createSecret(),
      };
  return launchProcesses(options, meet);
}

/** Ranks that were killed: they leave their section file behind. */
function lostRanks(outDir: string): string[] {
  const view = tryRead(outDir);
  return (view?.ranks ?? []).flatMap(({ rank, section }) => {
    if (!section || pidExists(section.pid)) return [];
    return [`rank ${rank} (pid ${section.pid}) was lost in section ${section.section} at step ${section.step}`];
  });
}

function tryRead(outDir: string) {
  try {
    return readRun(outDir, { beats: 1 });
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    return null; // the ranks exited before they created the folder
  }
}

function withResume(words: readonly string[]): string[] {
  const at = words.findIndex((word) => /^--resume(-from)?(=|$)/.test(word));
  if (at < 0) return [...words, '--resume', 'auto'];
  return [...words.slice(0, at), '--resume', 'auto', ...words.slice(at + (words[at].includes('=') ? 1 : 2))];
}
