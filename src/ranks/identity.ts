/**
 * Which of the processes of a run this is, as the launcher says it in the environment. The first launcher that is
 * recognised wins; half of its variables, or variables that contradict each other, are an error that names them.
 */
import { UsageError } from '../errors.js';
import { expandNodeList } from './nodelist.js';

export type Environment = Readonly<Record<string, string | undefined>>;

/** Who started the process. */
export type Launcher = 'torchrun' | 'kubeflow' | 'slurm' | 'openmpi' | 'pmix' | 'single';

export interface RankIdentity {
  readonly launcher: Launcher;
  readonly rank: number;
  /** Null when only MPI knows (PMIx without Open MPI's or Slurm's variables). */
  readonly world: number | null;
  /** The number of this process on its machine, and how many there are; null where the launcher does not say. */
  readonly localRank: number;
  readonly localWorld: number | null;
  /** Where ranks meet that do not talk through MPI. */
  readonly masterAddress: string;
  readonly masterPort: number;
  /** Names the run in all ranks, so that a rank of another run is not taken for one of this. */
  readonly runId: string;
}

const DEFAULT_ADDRESS = '127.0.0.1';
const DEFAULT_PORT = 29500;
const MOST_RANKS = 1 << 16;

/** Reads whole numbers by name, and remembers nothing. */
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

  /** All or nothing: undefined when none is set, an error naming the missing ones when only some are. */
  together(names: readonly string[], who: string): boolean {
    const missing = names.filter((name) => !this.has(name));
    if (missing.length === names.length) return false;
    if (missing.length === 0) return true;
    const there = names.filter((name) => this.has(name));
    throw new UsageError(
      `${there.join(' and ')} ${there.length > 1 ? 'are' : 'is'} set, but not ${missing.join(' and ')}: ` +
        `${who} sets all of them; set the missing, or unset the others`,
    );
  }
}

export function resolveRank(env: Environment): RankIdentity {
  const read = new Reader(env);
  const found = torchrun(read) ?? kubeflow(read) ?? slurm(read) ?? openMpi(read) ?? pmix(read) ?? single(read);
  expectInside(found);
  return found;
}

/** `torchrun, rank 1 of 2`, for the first line of a run and for doctor. */
export function describeIdentity({
  launcher,
  rank,
  world,
  localRank,
  masterAddress,
  masterPort,
}: RankIdentity): string {
  if (launcher === 'single') return 'a single process (no launcher in the environment)';
  const meet = launcher === 'torchrun' || launcher === 'slurm' ? `, meeting at ${masterAddress}:${masterPort}` : '';
  return `${NAMES[launcher]}: rank ${rank} of ${world ?? 'as many as MPI says'}, local rank ${localRank}${meet}`;
}

const NAMES: Record<Launcher, string> = {
  torchrun: 'RANK and WORLD_SIZE (torchrun, trefoil launch)',
  kubeflow: 'PET_* (Kubeflow)',
  slurm: 'SLURM_* (srun)',
  openmpi: 'OMPI_* (mpirun)',
  pmix: 'PMIX_*',
  single: 'single',
};

/** torchrun, Ray and `trefoil launch`: one process for every rank, and variables for each. */
function torchrun(read: Reader): RankIdentity | null {
  // WORLD_SIZE=1 alone is what a wrapper around a single process leaves; RANK alone is half of something.
  if (!read.has('RANK') && read.integer('WORLD_SIZE', 1, MOST_RANKS) === 1) return null;
  if (!read.together(['RANK', 'WORLD_SIZE'], 'torchrun')) return null;
  const world = read.integer('WORLD_SIZE', 1, MOST_RANKS)!;
  const rank = read.integer('RANK', 0, world - 1)!;
  expectSame('RANK', rank, 'OMPI_COMM_WORLD_RANK', read.integer('OMPI_COMM_WORLD_RANK', 0, MOST_RANKS));
  expectSame('WORLD_SIZE', world, 'OMPI_COMM_WORLD_SIZE', read.integer('OMPI_COMM_WORLD_SIZE', 1, MOST_RANKS));
  return {
    ...{ launcher: 'torchrun', rank, world },
    localRank:
      read.integer('LOCAL_RANK', 0, world - 1) ?? read.integer('OMPI_COMM_WORLD_LOCAL_RANK', 0, MOST_RANKS) ?? rank,
    localWorld: read.integer('LOCAL_WORLD_SIZE', 1, world) ?? null,
    ...meeting(read),
    runId: read.text('TORCHELASTIC_RUN_ID') ?? read.text('TREFOIL_RUN_ID') ?? 'none',
  };
}

/** Kubeflow tells a node about itself; the node's launcher starts the ranks. */
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

/** What PET_* say about this node; null without them. */
export function petNode(env: Environment): PetNode | null {
  return readPetNode(new Reader(env));
}

function readPetNode(read: Reader): PetNode | null {
  const names = ['PET_NNODES', 'PET_NPROC_PER_NODE'];
  if (!read.together(names, 'Kubeflow')) return null;
  const nodes = read.integer('PET_NNODES', 1, MOST_RANKS)!;
  const perNode = read.integer('PET_NPROC_PER_NODE', 1, MOST_RANKS)!;
  if (nodes > 1) read.together(['PET_NODE_RANK', 'PET_MASTER_ADDR', 'PET_MASTER_PORT', 'PET_NNODES'], 'Kubeflow');
  return {
    ...{ nodes, perNode },
    nodeRank: read.integer('PET_NODE_RANK', 0, nodes - 1) ?? 0,
    masterAddress: read.text('PET_MASTER_ADDR') ?? DEFAULT_ADDRESS,
    masterPort: read.integer('PET_MASTER_PORT', 1, 65535) ?? DEFAULT_PORT,
  };
}

/** A task of srun. Slurm's variables of an allocation or a batch script are no rank, and mpirun inside one has its own. */
function slurm(read: Reader): RankIdentity | null {
  if (!read.has('SLURM_STEP_ID') || read.has('OMPI_COMM_WORLD_RANK')) return null;
  const size = read.has('SLURM_STEP_NUM_TASKS') ? 'SLURM_STEP_NUM_TASKS' : 'SLURM_NTASKS';
  if (!read.together(['SLURM_PROCID', size], 'srun')) return null;
  const world = read.integer(size, 1, MOST_RANKS)!;
  const rank = read.integer('SLURM_PROCID', 0, world - 1)!;
  const list = read.text('SLURM_STEP_NODELIST') ?? read.text('SLURM_JOB_NODELIST') ?? read.text('SLURM_NODELIST');
  const { masterAddress, masterPort } = meeting(read, list === undefined ? DEFAULT_ADDRESS : expandNodeList(list)[0]);
  const job = read.integer('SLURM_JOB_ID', 0, Number.MAX_SAFE_INTEGER);
  return {
    ...{ launcher: 'slurm', rank, world, masterAddress },
    localRank: read.integer('SLURM_LOCALID', 0, world - 1) ?? rank,
    localWorld: null,
    // Two jobs on one machine must not meet: without MASTER_PORT the job's number chooses one.
    masterPort: read.has('MASTER_PORT') || job === undefined ? masterPort : 20000 + (job % 20000),
    runId: `slurm-${job ?? 0}-${read.text('SLURM_STEP_ID')}`,
  };
}

function openMpi(read: Reader): RankIdentity | null {
  if (!read.together(['OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE'], 'mpirun')) return null;
  const world = read.integer('OMPI_COMM_WORLD_SIZE', 1, MOST_RANKS)!;
  const rank = read.integer('OMPI_COMM_WORLD_RANK', 0, world - 1)!;
  return {
    ...{ launcher: 'openmpi', rank, world },
    localRank: read.integer('OMPI_COMM_WORLD_LOCAL_RANK', 0, world - 1) ?? rank,
    localWorld: read.integer('OMPI_COMM_WORLD_LOCAL_SIZE', 1, world) ?? null,
    ...meeting(read),
    runId: read.text('PMIX_NAMESPACE') ?? read.text('OMPI_MCA_ess_base_jobid') ?? 'mpirun',
  };
}

/** PMIx alone says which rank this is and not of how many: MPI will. */
function pmix(read: Reader): RankIdentity | null {
  if (!read.together(['PMIX_RANK', 'PMIX_NAMESPACE'], 'PMIx')) return null;
  const rank = read.integer('PMIX_RANK', 0, MOST_RANKS)!;
  const runId = read.text('PMIX_NAMESPACE')!;
  return { ...{ launcher: 'pmix', rank, world: null, localRank: rank, localWorld: null, runId }, ...meeting(read) };
}

function single(read: Reader): RankIdentity {
  const names = ['LOCAL_RANK', 'LOCAL_WORLD_SIZE'].filter((name) => read.has(name));
  if (names.length > 0)
    throw new UsageError(
      `${names.join(' and ')} ${names.length > 1 ? 'are' : 'is'} set, but not RANK and WORLD_SIZE: ` +
        'torchrun sets all of them; set the missing, or unset the others',
    );
  const alone = { rank: 0, world: 1, localRank: 0, localWorld: 1, runId: 'none' };
  return { launcher: 'single', ...alone, masterAddress: DEFAULT_ADDRESS, masterPort: DEFAULT_PORT };
}

function meeting(read: Reader, otherwise = DEFAULT_ADDRESS): Pick<RankIdentity, 'masterAddress' | 'masterPort'> {
  return {
    masterAddress: read.text('MASTER_ADDR') ?? otherwise,
    masterPort: read.integer('MASTER_PORT', 1, 65535) ?? DEFAULT_PORT,
  };
}

function expectSame(name: string, value: number, other: string, found: number | undefined): void {
  if (found === undefined || found === value) return;
  throw new UsageError(`${name} is ${value}, but ${other} is ${found}: unset the ones that are not of this launcher`);
}

function expectInside({ localRank, localWorld }: RankIdentity): void {
  if (localWorld === null || localRank < localWorld) return;
  throw new UsageError(`LOCAL_RANK is ${localRank}, but LOCAL_WORLD_SIZE is ${localWorld}: ranks count from 0`);
}
