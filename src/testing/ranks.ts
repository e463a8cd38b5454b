/** Ranks for tests: whether this machine can start some, and how. */
import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import { trefoilMain } from './cli.js';

/** Why no ranks can be started here; null when they can. */
export function mpirunAbsence(): string | null {
  const { error, status } = spawnSync('mpirun', ['--version'], { encoding: 'utf8' });
  return error || status !== 0 ? 'no mpirun (Debian: apt-get install openmpi-bin libopenmpi3)' : null;
}

export interface RanksResult {
  readonly code: number | null;
  readonly stdout: string;
  readonly stderr: string;
}

export interface StartedRanks {
  readonly child: ChildProcess;
  /** Output of both streams so far, in the order in which it came. */
  readonly output: () => string;
  readonly ended: Promise<RanksResult>;
}

type Variables = Readonly<Record<string, string>>;

/** mpirun's own words here: tests share few cores, and may run as root in a container. */
export function mpirunWords(ranks: number): string[] {
  const isRoot = process.getuid?.() === 0;
  return ['--oversubscribe', '--bind-to', 'none', ...(isRoot ? ['--allow-run-as-root'] : []), '-n', String(ranks)];
}

export function startMpirun(ranks: number, command: readonly string[], env: Variables = {}): StartedRanks {
  return started('mpirun', [...mpirunWords(ranks), ...command], env);
}

/** With words of the caller's own, which also say how many ranks. */
export function startMpirunWith(
  words: readonly string[],
  command: readonly string[],
  env: Variables = {},
): StartedRanks {
  return started('mpirun', [...words, ...command], env);
}

/** `trefoil launch` with these words. */
export function startLaunch(words: readonly string[], env: Variables = {}): StartedRanks {
  return started(process.execPath, [trefoilMain(), 'launch', ...words], env);
}

function started(program: string, words: readonly string[], env: Variables): StartedRanks {
  const child = spawn(program, words, { env: { ...process.env, ...env }, stdio: ['ignore', 'pipe', 'pipe'] });
  let [stdout, stderr, all] = ['', '', ''];
  child.stdout.on('data', (chunk) => {
    stdout += chunk;
    all += chunk;
  });
  child.stderr.on('data', (chunk) => {
    stderr += chunk;
    all += chunk;
  });
  const ended = new Promise<RanksResult>((resolve, reject) => {
    child.once('error', reject);
    child.once('close', (code) => resolve({ code, stdout, stderr }));
  });
  return { child, output: () => all, ended };
}
