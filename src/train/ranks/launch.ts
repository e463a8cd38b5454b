/**
 * Starts the ranks of this machine: through mpirun on CPUs, as child processes with torchrun's variables on GPUs. Output
 * lines are reported with their rank, signals are forwarded to the ranks, and a lost rank ends the others.
 */
import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import { existsSync, readdirSync } from 'node:fs';
import { createServer } from 'node:net';
import { createInterface } from 'node:readline';
import type { Environment } from '../../environment.js';
import { parentOf } from '../../process-identity.js';

export interface LaunchOptions {
  /** Ranks on this machine. */
  readonly ranks: number;
  /** The program of a rank and its arguments. */
  readonly command: readonly string[];
  readonly env: Environment;
  /** Called with each output line, its rank (null: mpirun itself), and whether it was written to stderr. */
  readonly onLine: (line: string, rank: number | null, isError: boolean) => void;
}

/** Running ranks. */
export interface Launched {
  /** Resolves with the exit code of the ranks, or 128 plus the number of the signal. */
  readonly ended: Promise<number>;
  /** Sends a signal to every rank. */
  signal(name: NodeJS.Signals): void;
}

/** Address of the rendezvous, and which ranks this machine starts. */
export interface Rendezvous {
  readonly world: number;
  readonly firstRank: number;
  readonly address: string;
  readonly port: number;
  readonly runId: string;
  /** The secret of the run; null if the environment, or a file that all machines share, holds it (secret.ts). */
  readonly secret: string | null;
}

const RANK_VARIABLES = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK'];
/** `[1,0]<stdout>:text`, as mpirun --tag-output writes it: job, rank, stream. */
const TAGGED = /^\[\d+,(\d+)\]<(stdout|stderr)>:(.*)$/;
/** After one rank has failed the others get this long to exit by themselves: they name it and record why. */
const GRACE_MS = 10_000;
const SIGNAL_NUMBERS: Readonly<Record<string, number>> = { SIGHUP: 1, SIGINT: 2, SIGABRT: 6, SIGKILL: 9, SIGTERM: 15 };

/** `ended` rejects with it if mpirun is not installed. */
export class NoMpirun extends Error {}

export function launchWithMpirun({ ranks, command, env, onLine }: LaunchOptions): Launched {
  const isRoot = process.getuid?.() === 0;
  const words = [
    // The caller may want more ranks than cores. Ranks have several threads, so they are not bound to one core.
    ...['--oversubscribe', '--bind-to', 'none', '--tag-output'],
    ...(isRoot ? ['--allow-run-as-root'] : []),
    ...['-n', String(ranks), ...command],
  ];
  const own = Object.fromEntries(Object.entries(env).filter(([name]) => !RANK_VARIABLES.includes(name)));
  // Its own process group: otherwise Ctrl-C reaches mpirun too, which kills the ranks at once.
  const child = spawn('mpirun', words, { env: own, detached: true, stdio: ['ignore', 'pipe', 'pipe'] });
  const read = (stream: NodeJS.ReadableStream, isError: boolean) =>
    createInterface({ input: stream }).on('line', (line) => {
      const tagged = TAGGED.exec(line);
      if (tagged) onLine(tagged[3], Number(tagged[1]), tagged[2] === 'stderr');
      else if (line.trim() !== '') onLine(line, null, isError);
    });
  read(child.stdout, false);
  read(child.stderr, true);
  return {
    ended: endOf(child),
    signal: (name) => {
      for (const pid of childrenOf(child.pid!)) kill(pid, name);
    },
  };
}

/** Starts one process per rank, with the variables that torchrun sets. */
export function launchProcesses({ ranks, command, env, onLine }: LaunchOptions, meet: Rendezvous): Launched {
  const [program, ...words] = command;
  const children = Array.from({ length: ranks }, (_, local) => {
    const rank = meet.firstRank + local;
    const variables = {
      RANK: rank,
      WORLD_SIZE: meet.world,
      LOCAL_RANK: local,
      LOCAL_WORLD_SIZE: ranks,
      MASTER_ADDR: meet.address,
      MASTER_PORT: meet.port,
      TREFOIL_RUN_ID: meet.runId,
      ...(meet.secret !== null && { TREFOIL_RUN_SECRET: meet.secret }),
    };
    const texts = Object.fromEntries(Object.entries(variables).map(([name, value]) => [name, String(value)]));
    const child = spawn(program, words, {
      env: { ...env, ...texts },
      detached: true,
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    createInterface({ input: child.stdout }).on('line', (line) => onLine(line, rank, false));
    createInterface({ input: child.stderr }).on('line', (line) => onLine(line, rank, true));
    return child;
  });
  const signal = (name: NodeJS.Signals) => {
    for (const { pid, exitCode, signalCode } of children)
      if (pid !== undefined && exitCode === null && signalCode === null) kill(pid, name);
  };
  return { signal, ended: endOfAll(children, signal) };
}

/** The exit code of the first rank that failed; 0 if none did. */
async function endOfAll(children: readonly ChildProcess[], signal: (name: NodeJS.Signals) => void): Promise<number> {
  let failure = 0;
  const timers: NodeJS.Timeout[] = [];
  const oneEnded = (code: number) => {
    if (code === 0 || failure !== 0) return;
    failure = code;
    // A stopped process handles no other signal than SIGKILL.
    timers.push(setTimeout(() => signal('SIGTERM'), GRACE_MS / 2));
    timers.push(setTimeout(() => signal('SIGKILL'), GRACE_MS));
  };
  await Promise.all(children.map((child) => endOf(child).then(oneEnded)));
  for (const timer of timers) clearTimeout(timer);
  return failure;
}

function endOf(child: ChildProcess): Promise<number> {
  return new Promise((resolve, reject) => {
    child.once('error', (error: NodeJS.ErrnoException) =>
      reject(error.code === 'ENOENT' ? new NoMpirun(error.message) : error),
    );
    child.once('close', (code, name) => resolve(code ?? 128 + (SIGNAL_NUMBERS[name ?? ''] ?? 0)));
  });
}

/** The child processes of `pid`. */
function childrenOf(pid: number): number[] {
  if (existsSync('/proc/self/stat'))
    return readdirSync('/proc')
      .map(Number)
      .filter((child) => child > 0 && parentOf(child) === pid);
  const { stdout } = spawnSync('ps', ['-axo', 'pid=,ppid='], { encoding: 'utf8' });
  return stdout.split('\n').flatMap((line) => {
    const [child, parent] = line.trim().split(/\s+/).map(Number);
    return parent === pid ? [child] : [];
  });
}

function kill(pid: number, name: NodeJS.Signals): void {
  try {
    process.kill(pid, name);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'ESRCH') throw error; // it has just exited
  }
}

/** A port that is free at this moment. */
export function freePort(): Promise<number> {
  return new Promise((resolve, reject) => {
    const server = createServer();
    server.once('error', reject);
    server.listen(0, '127.0.0.1', () => {
      const { port } = server.address() as { port: number };
      server.close(() => resolve(port));
    });
  });
}
