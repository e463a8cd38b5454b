/** env.json: on what machine, with which versions and settings a run took place. Never a credential. */
import { spawnSync } from 'node:child_process';
import { arch, cpus, hostname, platform, release, totalmem } from 'node:os';
import { trefoilVersion } from './version.js';

export interface RunEnvironment {
  machine: { host: string; platform: string; arch: string; cpu: string; cores: number; memory_mib: number };
  versions: Record<string, string>;
  /** NSA_* and the variables of a start with several ranks. */
  environment: Record<string, string>;
  git: { commit: string; branch: string; dirty: boolean } | null;
}

const RECORDED =
  /^(?:NSA_|TREFOIL_|DDP_SAFE$|CUDA_VISIBLE_DEVICES$|OMP_NUM_THREADS$|(?:RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|CONFIG)$)/;
/** A run folder is shared and archived. NSA_TOKENIZER is the one honest name that looks like a secret. */
const CREDENTIAL = /TOKEN(?!IZER)|SECRET|KEY|PASSW|CREDENTIAL|AUTH/i;
const MIB = 1024 * 1024;
const GIT_TIMEOUT_MS = 5_000;

type Variables = Readonly<Record<string, string | undefined>>;

/** `sourceFolder` is where to ask git for the commit. */
export function collectEnvironment(
  environment: Variables = process.env,
  sourceFolder: string = process.cwd(),
): RunEnvironment {
  const processors = cpus();
  return {
    machine: {
      host: hostname(),
      platform: `${platform()} ${release()}`,
      arch: arch(),
      cpu: processors[0]?.model ?? 'unknown',
      cores: processors.length,
      memory_mib: Math.round(totalmem() / MIB),
    },
    versions: { trefoil: trefoilVersion(), node: process.versions.node, v8: process.versions.v8 },
    environment: recordedVariables(environment),
    git: gitState(sourceFolder),
  };
}

/** The variables that belong into env.json. */
export function recordedVariables(environment: Variables): Record<string, string> {
  const recorded: Record<string, string> = {};
  for (const name of Object.keys(environment).sort()) {
    if (!RECORDED.test(name) || CREDENTIAL.test(name)) continue;
    // A URL may carry a user and a password in front of the host.
    recorded[name] = environment[name]!.replace(/:\/\/[^/\s@]*@/g, '://');
  }
  return recorded;
}

/** One call: a start of git takes longer than its answer. */
function gitState(folder: string): RunEnvironment['git'] {
  const status = git(folder, 'status', '--porcelain=v2', '--branch', '--untracked-files=no')?.split('\n') ?? [];
  const header = (name: string) => status.find((line) => line.startsWith(`# ${name} `))?.slice(name.length + 3);
  const commit = header('branch.oid');
  if (commit === undefined || commit === '(initial)') return null;
  const branch = header('branch.head') ?? 'unknown';
  // As `git rev-parse --abbrev-ref HEAD` calls it.
  const name = branch === '(detached)' ? 'HEAD' : branch;
  return { commit, branch: name, dirty: status.some((line) => line !== '' && !line.startsWith('#')) };
}

/** The answer of git, or undefined: outside a repository, or without git, a run goes on all the same. */
function git(folder: string, ...words: string[]): string | undefined {
  const options = { cwd: folder, encoding: 'utf8', timeout: GIT_TIMEOUT_MS } as const;
  const { status, stdout } = spawnSync('git', ['--no-optional-locks', ...words], options);
  return status === 0 ? stdout.trim() : undefined;
}
