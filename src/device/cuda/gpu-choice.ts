/** The GPU of a rank, and NCCL's settings when ranks share one. */
import type { Environment } from '../../environment.js';
import { UsageError } from '../../errors.js';

/** Lets several ranks train on one GPU. Slower than one rank; for trying out. */
const SHARE_GPU = 'TREFOIL_SHARE_GPU';

export function isGpuShared(environment: Environment): boolean {
  return environment[SHARE_GPU] === '1';
}

/**
 * The index of a rank's GPU among the visible ones: its local rank. A rank that sees only one GPU uses that, as Slurm and
 * Kubernetes assign GPUs. Ranks with the same GPU are refused later, in the rendezvous.
 */
export function chooseGpu(localRank: number, count: number, environment: Environment): number {
  if (localRank < count) return localRank;
  if (count === 1) return 0;
  if (isGpuShared(environment)) return localRank % count;
  throw new UsageError(
    `LOCAL_RANK ${localRank}: ${count} GPUs are visible, numbered from 0; start ${count} ranks on it, ` +
      `or let them share GPUs with ${SHARE_GPU}=1`,
  );
}

/** Refuses ranks that have the same GPU unless sharing is enabled. `gpus`: uuid and host of every rank. */
export function refuseSharedGpus(gpus: readonly { uuid: string; host: string }[], environment: Environment): void {
  if (isGpuShared(environment)) return;
  gpus.forEach(({ uuid, host }, rank) => {
    const first = gpus.findIndex((gpu) => gpu.uuid === uuid);
    if (first === rank) return;
    throw new UsageError(
      `ranks ${first} and ${rank} have the same GPU of ${host}: start one rank for each GPU, ` +
        `or let them share it with ${SHARE_GPU}=1`,
    );
  });
}

/**
 * NCCL refuses two ranks on one GPU of one machine. With these variables each rank appears to be on its own machine, and
 * data goes over the loopback network. Must be set before NCCL is loaded, which reads them once.
 */
export function sharedGpuSettings(rank: number, environment: Environment): Record<string, string> {
  const settings: Record<string, string> = {
    NCCL_HOSTID: `trefoil-rank-${rank}`,
    NCCL_P2P_DISABLE: '1',
    NCCL_SHM_DISABLE: '1',
    NCCL_IB_DISABLE: '1',
    NCCL_SOCKET_IFNAME: 'lo',
  };
  return Object.fromEntries(Object.entries(settings).filter(([name]) => !environment[name]));
}
