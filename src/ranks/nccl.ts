/** The ranks of a run on GPUs: each says which GPU it has, rank 0 makes NCCL's id, and all of them join. */
import koffi from 'koffi';
import type { CudaDevice } from '../device/cuda/cuda.js';
import { isGpuShared, refuseSharedGpus, sharedGpuSettings } from '../device/cuda/gpu-choice.js';
import { NcclCollectives, type NcclOptions } from '../device/cuda/nccl.js';
import { NcclLibrary } from '../device/cuda/nccl-library.js';
import { UsageError } from '../errors.js';
import type { RunPaths } from '../run/run-paths.js';
import { RankGuard } from './guard.js';
import type { Lifeline } from './guard-shared.js';
import type { RankIdentity } from './identity.js';
import { type Member, openStore, type RankStore, storePorts } from './store.js';

const ID_KEY = 'nccl-id';
const LIFELINE_KEY = 'lifeline';

export interface NcclRanks extends Omit<NcclOptions, 'id' | 'guard'> {
  readonly store: RankStore;
  readonly guard: RankGuard;
}

/** Every rank calls it. `environment` is the process's own: NCCL reads its settings there. */
export async function openNccl(
  device: CudaDevice,
  { store, ...options }: NcclRanks,
  environment: NodeJS.ProcessEnv = process.env,
): Promise<NcclCollectives> {
  const { rank } = options;
  const uuids = await store.gather('gpus', Buffer.from(device.uuid));
  const gpus = uuids.map((uuid, i) => ({ uuid: Buffer.from(uuid).toString(), host: store.members[i].host }));
  refuseSharedGpus(gpus, environment);
  if (isGpuShared(environment)) Object.assign(environment, sharedGpuSettings(rank, environment));
  const library = new NcclLibrary();
  // Joining blocks this thread, and rank 0 cannot hand out anything then.
  const id = await store.handOut(ID_KEY, rank === 0 ? library.uniqueId() : new Uint8Array());
  return new NcclCollectives(device, { ...options, id }, library);
}

export interface GpuRanks {
  readonly collectives: NcclCollectives;
  /** By rank. */
  readonly members: readonly Member[];
  /** A rank whose process is known to have ended. */
  readonly gone: () => number | null;
  /** A rank of which nothing was heard for the whole time limit. */
  readonly silent: () => number | null;
  /** From now on the files of this run tell what the ranks do. */
  readonly watch: (paths: RunPaths | null) => void;
  readonly close: () => void;
  /** Ends this process, whatever its GPU is doing. */
  readonly abort: (code: number) => void;
  /** Who went without a word; waits a moment for the news. */
  readonly lost: () => Promise<Member | null>;
}

/** NCCL notices a broken connection at about the same time as the store. */
const NEWS_MS = 2000;

/** Meets the other ranks at rank 0's store and joins them. */
export async function meetOnGpus(
  identity: RankIdentity,
  device: CudaDevice,
  { timeoutMs, ...hooks }: Pick<NcclOptions, 'onWait' | 'onResume'> & { readonly timeoutMs: number },
  environment: NodeJS.ProcessEnv = process.env,
): Promise<GpuRanks> {
  const { rank, masterAddress: address, masterPort: port } = identity;
  const world = knownWorld(identity, environment);
  // Ranks of an attempt that failed may still be about when the launcher starts the next.
  const runId = `${identity.runId} attempt ${environment['TORCHELASTIC_RESTART_COUNT'] ?? 0}`;
  const store = await openStore({ rank, world, runId, address, port, timeoutMs });
  const { members } = store;
  const guard = await RankGuard.start({
    ...{ rank, members, timeoutSeconds: timeoutMs / 1000, ports: storePorts(port), addresses: [address] },
  });
  const lifeline = await store.handOut(LIFELINE_KEY, Buffer.from(JSON.stringify(guard.lifeline)));
  const offered: Lifeline | null = JSON.parse(Buffer.from(lifeline).toString());
  if (rank !== 0 && offered) await guard.hold(offered);
  const collectives = await openNccl(device, { ...hooks, rank, world, store, guard }, environment);
  return {
    collectives,
    members,
    gone: () => guard.gone(),
    silent: () => guard.silent(),
    watch: (paths) => guard.watch(paths),
    close: () => {
      collectives.close();
      guard.close();
      store.close();
    },
    // The store's connection ends with the process, without a word: so the others learn of it.
    abort: leaveAtOnce,
    lost: () =>
      new Promise((resolve) => {
        setTimeout(() => resolve(null), NEWS_MS);
        store.onLost(resolve);
      }),
  };
}

/** Without the libraries' own farewells: they wait for the GPU, which may wait for a rank that is gone. */
function leaveAtOnce(code: number): void {
  koffi.load('libc.so.6').func('_exit', 'void', ['int'])(code);
}

/** How many ranks there are, if that and the place to meet are known without MPI. */
function knownWorld({ launcher, world, localWorld }: RankIdentity, environment: NodeJS.ProcessEnv): number {
  if (world === null)
    throw new UsageError(
      'ranks on GPUs must know how many they are: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT',
    );
  const isSpread = localWorld === null || localWorld < world;
  if ((launcher === 'openmpi' || launcher === 'pmix') && isSpread && !environment['MASTER_ADDR'])
    throw new UsageError(
      'ranks on GPUs of several machines meet at the machine of rank 0: name it with mpirun -x MASTER_ADDR=<host>',
    );
  return world;
}
