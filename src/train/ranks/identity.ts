/**
 * Rank, world size and rendezvous of this process, from the launcher's environment variables. The first launcher that is
 * recognised wins. An incomplete set of its variables, or contradicting ones, is an error that names them.
 */
import type { Environment } from '../../environment.js';
import { UsageError } from '../../errors.js';

/** The program that started this process. */
export type RankLauncher = 'torchrun' | 'kubeflow' | 'slurm' | 'openmpi' | 'pmix' | 'single';

/** Which rank this process is, and how ranks meet. */
export interface RankIdentity {
  readonly launcher: RankLauncher;
  readonly rank: number;
  /** World size; null if only MPI knows it (PMIx without Open MPI's or Slurm's variables). */
  readonly world: number | null;
  /** Rank among the processes of this machine. */
  readonly localRank: number;
  /** Number of processes on this machine; null if the launcher does not set it. */
  readonly localWorld: number | null;
  /** Rendezvous of ranks that do not use MPI. */
  readonly masterAddress: string;
  readonly masterPort: number;
  /** Identifies the run; the same in all its ranks. */
  readonly runId: string;
}

const DEFAULT_ADDRESS = '127.0.0.1';
const DEFAULT_PORT = 29500;
const MAX_RANKS = 1 << 16;

/** Typed access to environment variables. */
class Reader {
  readonly #env: Environment;

  constructor(env: Environment) {
    this.#env = env;
  }

  text(name: string): string | undefined {
    const value = this.#env[name]?.trim();
    return value === '' ? undefined : value;
  }

  has(name: string): boolean {
    return this.text(name) !== undefined;
  }

  integer(name: string, least: number, most: number): number | undefined {
    const text = this.text(name);
    if (text === undefined) return undefined;
    const value = Number(text);
    if (!/^[+-]?\d+$/.test(text) || value < least || value > most)
      throw new UsageError(`${name}: ${JSON.stringify(text)} is not an integer from ${least} to ${most}`);
    return value;
  }

  /** Whether all of these variables are set. Throws if only some are. */
  allSet(names: readonly string[], launcher: string): boolean {
    const missing = names.filter((name) => !this.has(name));
    if (missing.length === names.length) return false;
    if (missing.length === 0) return true;
    const present = names.filter((name) => this.has(name));
    throw new UsageError(
      `${present.join(' and ')} ${present.length > 1 ? 'are' : 'is'} set, but not ${missing.join(' and ')}: ` +
        `${launcher} sets all of them; set the missing ones, or unset the others`,
    );
  }
}

/** Reads this process's rank from the variables of its launcher. */
export function resolveRank(env: Environment): RankIdentity {
  const read = new Reader(env);
  const found = torchrun(read) ?? kubeflow(read) ?? slurm(read) ?? openMpi(read) ?? pmix(read) ?? single(read);
  expectInside(found);
  return found;
}

/** The identity in words, for the first line of a run and for doctor. */
export function describeIdentity({
  launcher,
  rank,
  world,
  localRank,
  masterAddress,
  masterPort,
}: RankIdentity): string {
  if (launcher === 'single') return 'a single process (no launcher in the environment)';
  const rendezvous =
    launcher === 'torchrun' || launcher === 'slurm' ? `, rendezvous at ${masterAddress}:${masterPort}` : '';
  return `${NAMES[launcher]}: rank ${rank} of ${world ?? 'a number known to MPI'}, local rank ${localRank}${rendezvous}`;
}

const NAMES: Record<RankLauncher, string> = {
  torchrun: 'RANK and WORLD_SIZE (torchrun, trefoil launch)',
  kubeflow: 'PET_* (Kubeflow)',
  slurm: 'SLURM_* (srun)',
  openmpi: 'OMPI_* (mpirun)',
  pmix: 'PMIX_*',
  single: 'single',
};

/** torchrun, Ray and `trefoil launch`: one process per rank, each with its own variables. */
function torchrun(read: Reader): RankIdentity | null {
  // A wrapper around a single process may set WORLD_SIZE=1 alone. RANK alone is an incomplete set.
  if (!read.has('RANK') && read.integer('WORLD_SIZE', 1, MAX_RANKS) === 1) return null;
  if (!read.allSet(['RANK', 'WORLD_SIZE'], 'torchrun')) return null;
  const world = read.integer('WORLD_SIZE', 1, MAX_RANKS)!;
  const rank = read.integer('RANK', 0, world - 1)!;
  expectSame('RANK', rank, 'OMPI_COMM_WORLD_RANK', read.integer('OMPI_COMM_WORLD_RANK', 0, MAX_RANKS));
  expectSame('WORLD_SIZE', world, 'OMPI_COMM_WORLD_SIZE', read.integer('OMPI_COMM_WORLD_SIZE', 1, MAX_RANKS));
  return {
    launcher: 'torchrun',
    rank,
    world,
    localRank:
      read.integer('LOCAL_RANK', 0, world - 1) ?? read.integer('OMPI_COMM_WORLD_LOCAL_RANK', 0, MAX_RANKS) ?? rank,
    localWorld: read.integer('LOCAL_WORLD_SIZE', 1, world) ?? null,
    ...rendezvous(read),
    runId: read.text('TORCHELASTIC_RUN_ID') ?? read.text('TREFOIL_RUN_ID') ?? 'none',
  };
}

/** Kubeflow describes a node; a launcher on the node starts its ranks. */
function kubeflow(read: Reader): RankIdentity | null {
  const node = readPetNode(read);
  if (node === null) return null;
  if (node.nodes === 1 && node.perNode === 1) return null;
  throw new UsageError(
    'PET_NNODES and PET_NPROC_PER_NODE describe a node, not a rank: start the ranks of this node with ' +
      '`trefoil launch -- train …` (it reads PET_*), or with torchrun',
  );
}

export interface PetNode {
  readonly nodes: number;
  readonly nodeRank: number;
  readonly perNode: number;
  readonly masterAddress: string;
  readonly masterPort: number;
}

/** This node as described by PET_*; null if they are not set. */
export function petNode(env: Environment): PetNode | null {
  return readPetNode(new Reader(env));
}

function readPetNode(read: Reader): PetNode | null {
  const names = ['PET_NNODES', 'PET_NPROC_PER_NODE'];
  if (!read.allSet(names, 'Kubeflow')) return null;
  const nodes = read.integer('PET_NNODES', 1, MAX_RANKS)!;
  const perNode = read.integer('PET_NPROC_PER_NODE', 1, MAX_RANKS)!;
  if (nodes > 1) read.allSet(['PET_NODE_RANK', 'PET_MASTER_ADDR', 'PET_MASTER_PORT', 'PET_NNODES'], 'Kubeflow');
  return {
    nodes,
    perNode,
    nodeRank: read.integer('PET_NODE_RANK', 0, nodes - 1) ?? 0,
    masterAddress: read.text('PET_MASTER_ADDR') ?? DEFAULT_ADDRESS,
    masterPort: read.integer('PET_MASTER_PORT', 1, 65535) ?? DEFAULT_PORT,
  };
}

/** A task of srun. An allocation or a batch script is not a rank, and mpirun inside one sets its own variables. */
function slurm(read: Reader): RankIdentity | null {
  if (!read.has('SLURM_STEP_ID') || read.has('OMPI_COMM_WORLD_RANK')) return null;
  const size = read.has('SLURM_STEP_NUM_TASKS') ? 'SLURM_STEP_NUM_TASKS' : 'SLURM_NTASKS';
  if (!read.allSet(['SLURM_PROCID', size], 'srun')) return null;
  const world = read.integer(size, 1, MAX_RANKS)!;
  const rank = read.integer('SLURM_PROCID', 0, world - 1)!;
  const list = read.text('SLURM_STEP_NODELIST') ?? read.text('SLURM_JOB_NODELIST') ?? read.text('SLURM_NODELIST');
  const { masterAddress, masterPort } = rendezvous(read, list === undefined ? DEFAULT_ADDRESS : firstHost(list));
  const job = read.integer('SLURM_JOB_ID', 0, Number.MAX_SAFE_INTEGER);
  return {
    launcher: 'slurm',
    rank,
    world,
    masterAddress,
    localRank: read.integer('SLURM_LOCALID', 0, world - 1) ?? rank,
    localWorld: null,
    // Jobs on one machine need different ports: without MASTER_PORT it follows from the job id.
    masterPort: read.has('MASTER_PORT') || job === undefined ? masterPort : 20000 + (job % 20000),
    runId: `slurm-${job ?? 0}-${read.text('SLURM_STEP_ID')}`,
  };
}

const HOST = String.raw`(?:[^,[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+`;
const NODE_LIST = new RegExp(`^(${HOST})(?:,${HOST})*$`);

/** The first host of Slurm's short form: node01 of `node[01-03,7],login`. */
export function firstHost(list: string): string {
  const first = NODE_LIST.exec(list.trim())?.[1];
  if (first === undefined) throw new UsageError(`the node list ${JSON.stringify(list)} cannot be read`);
  return first.replace(/\[(\d+)[^\]]*\]/g, '$1');
}

function openMpi(read: Reader): RankIdentity | null {
  if (!read.allSet(['OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE'], 'mpirun')) return null;
  const world = read.integer('OMPI_COMM_WORLD_SIZE', 1, MAX_RANKS)!;
  const rank = read.integer('OMPI_COMM_WORLD_RANK', 0, world - 1)!;
  return {
    launcher: 'openmpi',
    rank,
    world,
    localRank: read.integer('OMPI_COMM_WORLD_LOCAL_RANK', 0, world - 1) ?? rank,
    localWorld: read.integer('OMPI_COMM_WORLD_LOCAL_SIZE', 1, world) ?? null,
    ...rendezvous(read),
    runId: read.text('PMIX_NAMESPACE') ?? read.text('OMPI_MCA_ess_base_jobid') ?? 'mpirun',
  };
}

/** PMIx alone provides the rank but not the world size, which MPI knows. */
function pmix(read: Reader): RankIdentity | null {
  if (!read.allSet(['PMIX_RANK', 'PMIX_NAMESPACE'], 'PMIx')) return null;
  const rank = read.integer('PMIX_RANK', 0, MAX_RANKS)!;
  const runId = read.text('PMIX_NAMESPACE')!;
  return {
    launcher: 'pmix',
    rank,
    world: null,
    localRank: rank,
    localWorld: null,
    runId,
    ...rendezvous(read),
  };
}

function single(read: Reader): RankIdentity {
  const names = ['LOCAL_RANK', 'LOCAL_WORLD_SIZE'].filter((name) => read.has(name));
  if (names.length > 0)
    throw new UsageError(
      `${names.join(' and ')} ${names.length > 1 ? 'are' : 'is'} set, but not RANK and WORLD_SIZE: ` +
        'torchrun sets all of them; set the missing ones, or unset the others',
    );
  const only = { rank: 0, world: 1, localRank: 0, localWorld: 1, runId: 'none' };
  return { launcher: 'single', ...only, masterAddress: DEFAULT_ADDRESS, masterPort: DEFAULT_PORT };
}

function rendezvous(read: Reader, host = DEFAULT_ADDRESS): Pick<RankIdentity, 'masterAddress' | 'masterPort'> {
  return {
    masterAddress: read.text('MASTER_ADDR') ?? host,
    masterPort: read.integer('MASTER_PORT', 1, 65535) ?? DEFAULT_PORT,
  };
}

function expectSame(name: string, value: number, other: string, found: number | undefined): void {
  if (found === undefined || found === value) return;
  throw new UsageError(`${name} is ${value}, but ${other} is ${found}: unset those of the other launcher`);
}

function expectInside({ localRank, localWorld }: RankIdentity): void {
  if (localWorld === null || localRank < localWorld) return;
  throw new UsageError(`LOCAL_RANK is ${localRank}, but LOCAL_WORLD_SIZE is ${localWorld}: ranks count from 0`);
}
