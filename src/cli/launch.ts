/** `trefoil launch`: starts the ranks of this machine, and restarts them when one is lost. */
import { randomUUID } from 'node:crypto';
import { fileURLToPath } from 'node:url';
import { parseTrainFlags } from '../config/flags.js';
import { loadConfig, pickConfigByGpuMemory } from '../config/load.js';
import { hint } from '../config/suggest.js';
import { cudaAbsence } from '../device/cuda/cuda.js';
import { ExitCode, UsageError } from '../errors.js';
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
import type { Io } from './shared/io.js';
import { gpuMemoryGib } from './train.js';

const HELP = `Usage: trefoil launch -n <ranks> [--restarts <r>] [--] train [options]

Starts the ranks of a training run on this machine: through mpirun on CPUs, as
one process per GPU otherwise. Output lines are prefixed with their rank.
SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 are forwarded to all ranks; a closed
terminal counts as SIGTERM.

  -n, --nproc-per-node <ranks>    ranks on this machine
                                  (default: PET_NPROC_PER_NODE, if set)
  --restarts, --max-restarts <r>  restarts with --resume auto when a rank fails
                                  or is lost (default: 0)
  -h, --help                      print this help

train.batch_size is per rank: a step takes
batch_size * accumulate_grad_batches * ranks sequences.
For several machines use mpirun, torchrun, Slurm or Kubernetes
(docs/guide/several-gpus.md). Exit code: that of the ranks.

Example:
  trefoil launch -n 2 --restarts 3 -- train --config quickstart
`;

interface Request {
  readonly ranks: number | null;
  readonly restarts: number;
  /** Flags of train. */
  readonly words: readonly string[];
}

export async function run(argv: readonly string[], io: Io): Promise<number> {
  const own = argv.slice(0, commandAt(argv));
  if (own.includes('--help') || own.includes('-h')) {
    io.out(HELP.trimEnd());
    return ExitCode.done;
  }
  const request = parse(argv);
  const line = parseTrainFlags(request.words);
  if (line.help) throw new UsageError('launch: the flags of train are listed by trefoil train --help');
  const { config } = loadConfig({
    env: io.env,
    flags: line.layer,
    config: line.config,
    otherwise: pickConfigByGpuMemory(gpuMemoryGib(line.layer.get('runtime.device')?.value)),
  });
  const { device } = config.runtime;
  const isCuda = device !== 'cpu' && cudaAbsence() === null;
  if (device === 'cuda' && !isCuda) throw new UsageError(`--device cuda: ${cudaAbsence()} (or use --device cpu)`);
  return await launch(request, { isCuda, outDir: config.train.out_dir, json: line.json }, io);
}

interface Place {
  readonly isCuda: boolean;
  readonly outDir: string;
  readonly json: boolean;
}

async function launch(request: Request, place: Place, io: Io): Promise<number> {
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
  const ranks = request.ranks ?? node?.perNode;
  if (ranks === undefined) throw new UsageError('launch: number of ranks missing; give -n <ranks>');
  const onLine = (line: string, rank: number | null, isError: boolean) => {
    if (json && !isError && rank === 0) io.out(line);
    // After a stop that was asked for, mpirun reports the exit codes of the ranks as a failure.
    else if (!(rank === null && isAsked())) (isError || json ? io.err : io.out)(`[${rank ?? 'mpirun'}] ${line}`);
  };
  const options = { ranks, command: [process.execPath, main, 'train', ...words], env: io.env, onLine };
  // Seconds may pass until the first rank prints.
  io.err(`launch: starting ${plural(ranks, 'rank')}${isCuda ? '' : ' with mpirun'}`);
  if (!isCuda) {
    if (node && node.nodes > 1)
      throw new UsageError('PET_NNODES: start CPU ranks on several machines with mpirun instead of launch');
    return launchWithMpirun(options);
  }
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

/** Index of the ranks' command: after `--`, or at the first argument that is neither a flag nor its value. */
function commandAt(argv: readonly string[]): number {
  for (let i = 0; i < argv.length; i++) {
    if (argv[i] === '--' || !argv[i].startsWith('-')) return i;
    if (VALUED.has(argv[i])) i += 1;
  }
  return argv.length;
}

const RANK_FLAGS = ['-n', '--nproc-per-node', '--nproc_per_node'];
const RESTART_FLAGS = ['--restarts', '--max-restarts', '--max_restarts'];
const VALUED = new Set([...RANK_FLAGS, ...RESTART_FLAGS]);

function parse(argv: readonly string[]): Request {
  const at = commandAt(argv);
  const values = new Map<string, number>();
  for (let i = 0; i < at; i++) {
    const [flag, inline] = argv[i].split('=', 2);
    const name = RANK_FLAGS.includes(flag) ? 'ranks' : RESTART_FLAGS.includes(flag) ? 'restarts' : null;
    if (name === null)
      throw new UsageError(`launch: ${flag}: unknown flag${hint(flag, [...VALUED])}; see trefoil launch --help`);
    const text = inline ?? argv[++i] ?? '';
    const least = name === 'ranks' ? 1 : 0;
    if (!/^\d+$/.test(text) || Number(text) < least)
      throw new UsageError(`launch: ${flag}: ${JSON.stringify(text)} is not an integer >= ${least}`);
    values.set(name, Number(text));
  }
  const [command, ...words] = argv.slice(argv[at] === '--' ? at + 1 : at);
  if (command !== 'train')
    throw new UsageError('launch: command missing; write trefoil launch -n <ranks> -- train [options]');
  return { ranks: values.get('ranks') ?? null, restarts: values.get('restarts') ?? 0, words };
}
