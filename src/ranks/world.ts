/** All ranks of a run: who they are, how they talk, and the way out when one of them is lost. */
import { availableParallelism, cpus, hostname, networkInterfaces } from 'node:os';
import type { Collectives } from '../device/collectives.js';
import { CpuDevice } from '../device/cpu/cpu.js';
import { CudaDevice } from '../device/cuda/cuda.js';
import type { Device } from '../device/device.js';
import { MpiCollectives } from '../device/mpi/collectives.js';
import { UsageError } from '../errors.js';
import type { RunPaths } from '../run/run-paths.js';
import { RankGuard } from './guard.js';
import type { Lifeline } from './guard-shared.js';
import { describeIdentity, type RankIdentity } from './identity.js';
import { type Member, RankMonitor } from './monitor.js';
import { meetOnGpus } from './nccl.js';
import { createSecret } from './secret.js';
import { Together } from './together.js';

/** MPI too takes whichever port is free. */
const ANY_PORT = 0;

export interface WorldOptions {
  /** Seconds a rank waits for the others before it looks for the one to blame and gives up. */
  readonly timeoutSeconds: number;
}

/** How a waiting exchange lets the world look about; collectives of every kind take these. */
export interface WaitHooks {
  readonly onWait: (waitedMs: number) => void;
  readonly onResume: () => void;
}

export interface OpenedRanks {
  readonly collectives: Collectives;
  /** By rank, where they know each other already; else they tell each other. */
  readonly members?: readonly Member[];
  /** A rank whose process is known to have ended. */
  readonly gone?: () => number | null;
  /** A rank of which nothing was heard for the whole time limit, since it is stopped, or its machine. */
  readonly silent?: () => number | null;
  /** Hears which run's files tell what the ranks do. */
  readonly watch?: (paths: RunPaths | null) => void;
  readonly close: () => void;
  /** Ends every rank it can reach. */
  readonly abort: (code: number) => void;
  /** The rank that went without a word, where that can be known. */
  readonly lost?: () => Promise<(Member & { readonly rank: number }) | null>;
}

export class World {
  readonly identity: RankIdentity;
  readonly rank: number;
  readonly size: number;
  readonly collectives: Collectives;
  readonly together: Together;
  readonly monitor: RankMonitor;
  /** By rank. */
  readonly members: readonly Member[];
  readonly #opened: OpenedRanks;

  constructor(identity: RankIdentity, device: Device, options: WorldOptions, open: (hooks: WaitHooks) => OpenedRanks) {
    // Until everybody is here there is nobody to blame.
    let monitor: RankMonitor | null = null;
    const opened = open({
      onWait: (waitedMs) => monitor?.look(waitedMs),
      onResume: () => monitor?.resume(),
    });
    this.identity = identity;
    const { collectives } = opened;
    this.collectives = collectives;
    this.rank = collectives.rank;
    this.size = collectives.world;
    this.#opened = opened;
    this.together = new Together(device, collectives);
    this.members =
      opened.members ??
      this.together
        .gather(JSON.stringify({ host: hostname(), pid: process.pid }))
        .map((text) => JSON.parse(text) as Member);
    const { rank, members } = this;
    const { gone, silent, watch: onWatch } = opened;
    const news = { ...(gone && { gone }), ...(silent && { silent }), ...(onWatch && { onWatch }) };
    monitor = new RankMonitor({ rank, members, ...options, ...news });
    this.monitor = monitor;
  }

  get isFirst(): boolean {
    return this.rank === 0;
  }

  /** The first rank of its machine: what it prepares in caches there the others find. */
  get isFirstOfHost(): boolean {
    return this.members.findIndex(({ host }) => host === this.members[this.rank].host) === this.rank;
  }

  describe(): string {
    const hosts = [...new Set(this.members.map(({ host }) => host))];
    const where = hosts.length === 1 ? hosts[0] : `${hosts.length} hosts (${hosts.join(', ')})`;
    return `ranks: ${this.size} over ${this.collectives.kind} on ${where}; ${describeIdentity(this.identity)}`;
  }

  /** Every rank calls it, when all is done. */
  close(): void {
    this.monitor.watch(null);
    this.#opened.close();
  }

  /** In words who went without a word, after an exchange has failed; empty when nobody knows. */
  async describeLost(): Promise<string> {
    const lost = await this.#opened.lost?.();
    return lost ? `rank ${lost.rank} on ${lost.host} (pid ${lost.pid}) is gone` : '';
  }

  /** Ends all ranks at once, with this exit code where the launcher passes it on. */
  abort(code: number): void {
    this.#opened.abort(code);
  }
}

/** Joins the other ranks. `identity` is that of a process among several. */
export async function openWorld(identity: RankIdentity, device: Device, options: WorldOptions): Promise<World> {
  if (device instanceof CpuDevice) return openMpiWorld(identity, device, options);
  if (device instanceof CudaDevice) return openNcclWorld(identity, device, options);
  throw new UsageError(`several ranks on a device of kind ${device.kind} cannot meet; use --ddp 0`);
}

async function openNcclWorld(identity: RankIdentity, device: CudaDevice, options: WorldOptions): Promise<World> {
  let hooks: WaitHooks | null = null;
  const ranks = await meetOnGpus(identity, device, {
    timeoutMs: 1000 * options.timeoutSeconds,
    onWait: (waitedMs) => hooks?.onWait(waitedMs),
    onResume: () => hooks?.onResume(),
  });
  return new World(identity, device, options, (own) => {
    hooks = own;
    return ranks;
  });
}

async function openMpiWorld(identity: RankIdentity, device: CpuDevice, options: WorldOptions): Promise<World> {
  const { launcher, world, rank } = identity;
  if (launcher === 'torchrun' && process.env['OMPI_COMM_WORLD_SIZE'] === undefined)
    throw new UsageError(
      'RANK and WORLD_SIZE: ranks on CPUs meet through MPI, which torchrun does not start; ' +
        `use \`trefoil launch -n ${world} -- train …\` or \`mpirun -n ${world} npx trefoil train …\``,
    );
  let guard: RankGuard | null = null;
  const opened = new World(identity, device, options, (hooks) => {
    const collectives = new MpiCollectives(device, hooks);
    if (world !== null && collectives.world !== world)
      throw new UsageError(
        `the launcher (${launcher}) started ${world} ranks, but MPI sees ${collectives.world}: ` +
          (launcher === 'slurm'
            ? 'start them with srun --mpi=pmix, or with mpirun'
            : 'use the mpirun of the same MPI library'),
      );
    if (collectives.rank !== rank)
      throw new UsageError(`the launcher (${launcher}) says rank ${rank}, but MPI says ${collectives.rank}`);
    return {
      collectives,
      gone: () => guard?.gone() ?? null,
      silent: () => guard?.silent() ?? null,
      close: () => {
        collectives.close();
        guard?.close();
      },
      abort: (code) => collectives.abortWith(code),
    };
  });
  guard = await guardOfHosts(opened, options);
  return opened;
}

/** Tells of ranks on other machines, until the files of a run do; null on one machine, where everybody sees the processes. */
async function guardOfHosts({ rank, members, together }: World, options: WorldOptions): Promise<RankGuard | null> {
  if (members.every(({ host }) => host === members[0].host)) return null;
  // Whoever can read MPI's traffic can read the gradients: its connections may carry the key of the lifelines.
  const key = together.share(createSecret());
  const guard = await RankGuard.start({
    ...{ rank, members, ...options, key, ports: [ANY_PORT], addresses: ownAddresses() },
  });
  const offered: Lifeline | null = JSON.parse(together.share(JSON.stringify(guard.lifeline)));
  if (rank !== 0 && offered) await guard.hold(offered);
  return guard;
}

/** Those by which other machines may reach this one. */
function ownAddresses(): string[] {
  const all = Object.values(networkInterfaces()).flatMap((addresses) => addresses ?? []);
  const outer = all.filter(({ internal, address }) => !internal && !address.startsWith('fe80:'));
  return [...outer.map(({ address }) => address), hostname()];
}

/** Threads of this rank when the config leaves them open: its cores, or its share of the machine's. */
export function threadsOfRank({ localWorld }: RankIdentity): number {
  const cores = availableParallelism();
  const isBound = cores < cpus().length;
  return isBound || localWorld === null ? cores : Math.max(1, Math.floor(cores / localWorld));
}
