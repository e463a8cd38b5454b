/** Ranks on GPUs: they exchange which GPU each has, rank 0 creates NCCL's id, and all join the communicator. */

import type { CudaDevice } from '../../device/cuda/cuda.js';
import { isGpuShared, refuseSharedGpus, sharedGpuSettings } from '../../device/cuda/gpu-choice.js';
import { NcclCollectives, type NcclOptions } from '../../device/cuda/nccl.js';
import { NcclLibrary } from '../../device/cuda/nccl-library.js';
import koffi from '../../device/koffi.js';
import { UsageError } from '../../errors.js';
import { RankGuard } from './guard.js';
import type { Lifeline } from './guard-shared.js';
import type { RankIdentity } from './identity.js';
import { runKey } from './secret.js';
import { openStore, type RankStore, storePorts } from './store.js';
import type { OpenedRanks } from './world.js';

const ID_KEY = 'nccl-id';
const LIFELINE_KEY = 'lifeline';

export interface NcclRanks extends Omit<NcclOptions, 'id' | 'guard'> {
  readonly store: RankStore;
  readonly guard: RankGuard;
}

/** Collective: every rank calls it. `environment` is changed; NCCL reads its settings from the process's own. */
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
  // Joining blocks this thread; until then rank 0 must have handed out the id.
  const id = await store.handOut(ID_KEY, rank === 0 ? library.uniqueId() : new Uint8Array());
  return new NcclCollectives(device, { ...options, id }, library);
}

/** How long to wait for the report of a lost rank: the store and NCCL notice a broken connection at about the same time. */
const NEWS_MS = 2000;

/** Joins the other ranks: rendezvous at rank 0's store, lifelines, then NCCL. */
export async function meetOnGpus(
  identity: RankIdentity,
  device: CudaDevice,
  { timeoutMs, ...hooks }: Pick<NcclOptions, 'onWait' | 'onResume'> & { readonly timeoutMs: number },
  environment: NodeJS.ProcessEnv = process.env,
): Promise<OpenedRanks> {
  const { rank, masterAddress: address, masterPort: port } = identity;
  const world = knownWorld(identity, environment);
  const key = runKey(identity, environment);
  const store = await openStore({ rank, world, key, address, port, timeoutMs });
  const { members } = store;
  const guard = await RankGuard.start({
    rank,
    members,
    timeoutSeconds: timeoutMs / 1000,
    ports: storePorts(port),
    addresses: [address],
    key,
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
    abort: exitAtOnce, // the store's connection closes with the process: so the other ranks are notified
    lost: () =>
      new Promise((resolve) => {
        setTimeout(() => resolve(null), NEWS_MS);
        store.onLost(resolve);
      }),
  };
}

/** Exits without the libraries' exit handlers: they wait for the GPU, which may wait for a rank that is gone. */
function exitAtOnce(code: number): void {
  koffi.load('libc.so.6').func('_exit', 'void', ['int'])(code);
}

/** The number of ranks. Throws if it, or the address of rank 0, is known to MPI only. */
function knownWorld({ launcher, world, localWorld }: RankIdentity, environment: NodeJS.ProcessEnv): number {
  if (world === null)
    throw new UsageError(
      'the number of ranks is unknown: for ranks on GPUs set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT',
    );
  const isSpread = localWorld === null || localWorld < world;
  if ((launcher === 'openmpi' || launcher === 'pmix') && isSpread && !environment['MASTER_ADDR'])
    throw new UsageError(
      'MASTER_ADDR is not set: for ranks on GPUs of several machines pass the host of rank 0, mpirun -x MASTER_ADDR=<host>',
    );
  return world;
}
