import { describe, expect, it, test } from 'vitest';
import { describeIdentity, firstHost, petNode, resolveRank } from './identity.js';

const TORCHRUN = { RANK: '3', WORLD_SIZE: '4', LOCAL_RANK: '1', LOCAL_WORLD_SIZE: '2' };
const MEETING = { MASTER_ADDR: 'node0', MASTER_PORT: '1234' };
const SRUN = {
  SLURM_JOB_ID: '4711',
  SLURM_STEP_ID: '0',
  SLURM_PROCID: '5',
  SLURM_STEP_NUM_TASKS: '8',
  SLURM_LOCALID: '1',
};
const MPIRUN = { OMPI_COMM_WORLD_RANK: '2', OMPI_COMM_WORLD_SIZE: '3' };
const PET = {
  PET_NNODES: '2',
  PET_NPROC_PER_NODE: '4',
  PET_NODE_RANK: '1',
  PET_MASTER_ADDR: 'job-0',
  PET_MASTER_PORT: '29400',
};

describe('the identity of a rank', () => {
  it('is a single process without a launcher', () => {
    expect(resolveRank({})).toMatchObject({ launcher: 'single', rank: 0, world: 1, localRank: 0 });
    expect(resolveRank({ WORLD_SIZE: '1' })).toMatchObject({ launcher: 'single', world: 1 });
    expect(resolveRank({ RANK: '', WORLD_SIZE: '' })).toMatchObject({ launcher: 'single' });
  });

  it('reads the variables of torchrun', () => {
    expect(resolveRank({ ...TORCHRUN, ...MEETING, TORCHELASTIC_RUN_ID: 'x' })).toEqual({
      launcher: 'torchrun',
      rank: 3,
      world: 4,
      localRank: 1,
      localWorld: 2,
      masterAddress: 'node0',
      masterPort: 1234,
      runId: 'x',
    });
  });

  it('reads a task of srun; the rendezvous is on the first node of the list', () => {
    const found = resolveRank({ ...SRUN, SLURM_STEP_NODELIST: 'gpu[03-04]' });
    expect(found).toMatchObject({ launcher: 'slurm', rank: 5, world: 8, localRank: 1, masterAddress: 'gpu03' });
    expect(found.masterPort).toBe(20000 + 4711);
    expect(found.runId).toBe('slurm-4711-0');
    expect(resolveRank({ ...SRUN, ...MEETING })).toMatchObject({ masterAddress: 'node0', masterPort: 1234 });
  });

  it('is a single process inside a Slurm allocation without srun', () => {
    const { SLURM_STEP_ID: _step, ...batch } = SRUN;
    expect(resolveRank(batch).launcher).toBe('single');
  });

  it('reads mpirun, also inside a Slurm allocation', () => {
    const found = { launcher: 'openmpi', rank: 2, world: 3 };
    expect(resolveRank(MPIRUN)).toMatchObject(found);
    expect(resolveRank({ ...SRUN, ...MPIRUN })).toMatchObject(found);
  });

  it('reads PMIx alone; MPI knows the world size', () => {
    const found = resolveRank({ PMIX_RANK: '1', PMIX_NAMESPACE: 'job' });
    expect(found).toMatchObject({ launcher: 'pmix', rank: 1, world: null, runId: 'job' });
    expect(describeIdentity(found)).toContain('rank 1 of a number known to MPI');
  });

  it('uses the first match: torchrun, Kubeflow, Slurm, mpirun', () => {
    expect(resolveRank({ ...TORCHRUN, ...PET, ...SRUN }).launcher).toBe('torchrun');
    expect(() => resolveRank({ ...PET, ...SRUN, ...MPIRUN })).toThrow('PET_NNODES');
    expect(resolveRank({ ...SRUN, PMIX_RANK: '5', PMIX_NAMESPACE: 'job' }).launcher).toBe('slurm');
  });

  it('PET_* describe a node, whose launcher starts the ranks', () => {
    expect(() => resolveRank(PET)).toThrow('trefoil launch -- train');
    expect(petNode(PET)).toEqual({ nodes: 2, nodeRank: 1, perNode: 4, masterAddress: 'job-0', masterPort: 29400 });
    expect(petNode({})).toBeNull();
    expect(resolveRank({ PET_NNODES: '1', PET_NPROC_PER_NODE: '1' }).launcher).toBe('single');
  });

  it.each([
    [{ RANK: '1' }, 'RANK is set, but not WORLD_SIZE'],
    [{ WORLD_SIZE: '2' }, 'WORLD_SIZE is set, but not RANK'],
    [{ LOCAL_RANK: '0' }, 'LOCAL_RANK is set, but not RANK and WORLD_SIZE'],
    [{ RANK: '4', WORLD_SIZE: '4' }, 'RANK: "4" is not an integer from 0 to 3'],
    [{ RANK: '0', WORLD_SIZE: 'two' }, 'WORLD_SIZE: "two" is not an integer'],
    [{ ...TORCHRUN, LOCAL_RANK: '2' }, 'LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2'],
    [{ ...TORCHRUN, MASTER_PORT: '70000' }, 'MASTER_PORT: "70000" is not an integer from 1 to 65535'],
    [{ ...TORCHRUN, ...MPIRUN }, 'RANK is 3, but OMPI_COMM_WORLD_RANK is 2'],
    [{ RANK: '2', WORLD_SIZE: '4', ...MPIRUN }, 'WORLD_SIZE is 4, but OMPI_COMM_WORLD_SIZE is 3'],
    [{ OMPI_COMM_WORLD_RANK: '0' }, 'OMPI_COMM_WORLD_RANK is set, but not OMPI_COMM_WORLD_SIZE'],
    [{ SLURM_STEP_ID: '0', SLURM_PROCID: '1' }, 'SLURM_PROCID is set, but not SLURM_NTASKS'],
    [{ ...SRUN, SLURM_PROCID: '8' }, 'SLURM_PROCID: "8" is not an integer from 0 to 7'],
    [{ PET_NNODES: '2' }, 'PET_NNODES is set, but not PET_NPROC_PER_NODE'],
    [{ PET_NNODES: '2', PET_NPROC_PER_NODE: '1' }, 'but not PET_NODE_RANK'],
    [{ PMIX_RANK: '0' }, 'PMIX_RANK is set, but not PMIX_NAMESPACE'],
  ])('%j is refused by name', (env, message) => expect(() => resolveRank(env)).toThrow(message));
});

test.each([
  ['node1', 'node1'],
  ['a,b,c', 'a'],
  ['node[1-3]', 'node1'],
  ['node[08-11]', 'node08'],
  ['gpu[1,3-4,07],login', 'gpu1'],
  ['r[1-2]n[1-2]', 'r1n1'],
  ['rack-[1-2]-x.example.org', 'rack-1-x.example.org'],
])('the first host of %s', (list, host) => expect(firstHost(list)).toBe(host));

test.each(['', 'node[1-2', 'node1]', 'node[[1]]', 'node[a-b]', 'a,,b'])('%s is refused', (list) =>
  expect(() => firstHost(list)).toThrow('cannot be read'),
);
