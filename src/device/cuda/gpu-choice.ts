/** Which GPU a rank takes, and what NCCL must be told when ranks share one. */
import { UsageError } from '../../errors.js';
import type { Environment } from './libraries.js';

/** Lets several ranks train on one GPU: slower than one rank, and good for trying things out. */
export const SHARE_GPU = 'TREFOIL_SHARE_GPU';

export function isGpuShared(environment: Environment): boolean {
  return environment[SHARE_GPU] === '1';
}

/**
 * The GPU of a rank, counted among the visible ones: its number on this machine. A rank that sees only one takes that:
 * Slurm and Kubernetes hand out GPUs so (ranks that turn out to have the same one are refused when they meet).
 */
export function chooseGpu(localRank: number, count: number, environment: Environment): number {
  if (localRank < count) return localRank;
  if (count === 1) return 0;
  if (isGpuShared(environment)) return localRank % count;
  throw new UsageError(
    `LOCAL_RANK ${localRank}: this machine shows ${count} GPUs, counted from 0; start ${count} ranks on it, ` +
      `or let them share GPUs with ${SHARE_GPU}=1`,
  );
}

/** Refuses ranks that have the same GPU, unless they were told to share. `gpus`: uuid and host of every rank. */
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
 * NCCL refuses two ranks on one GPU of one machine. Told that each has a machine of its own, and kept from the ways that
 * only exist inside one, it goes over the network's loopback. Before NCCL is loaded: it reads these once.
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
