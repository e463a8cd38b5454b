/** The ranks of a run on GPUs: each says which GPU it has, rank 0 makes NCCL's id, and all of them join. */
import type { CudaDevice } from '../device/cuda/cuda.js';
import { isGpuShared, refuseSharedGpus, sharedGpuSettings } from '../device/cuda/gpu-choice.js';
import { NcclCollectives, type NcclOptions } from '../device/cuda/nccl.js';
import { NcclLibrary } from '../device/cuda/nccl-library.js';
import type { RankStore } from './store.js';

const ID_KEY = 'nccl-id';

export interface NcclRanks extends Omit<NcclOptions, 'id'> {
  readonly store: RankStore;
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
  if (rank === 0) await store.set(ID_KEY, library.uniqueId());
  const id = await store.get(ID_KEY);
  return new NcclCollectives(device, { ...options, id }, library);
}
