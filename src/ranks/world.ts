/** All ranks of a run: who they are, how they talk, and the way out when one of them is lost. */
import { availableParallelism, cpus, hostname } from 'node:os';
import type { Collectives } from '../device/collectives.js';
import { CpuDevice } from '../device/cpu/cpu.js';
import type { Device } from '../device/device.js';
import { MpiCollectives } from '../device/mpi/collectives.js';
import { UsageError } from '../errors.js';
import { describeIdentity, type RankIdentity } from './identity.js';
import { type Member, RankMonitor } from './monitor.js';
import { Together } from './together.js';

export interface WorldOptions {
  /** Seconds a rank waits for the others before it looks for the one to blame and gives up. */
  readonly timeoutSeconds: number;
}

/** How a waiting exchange lets the world look about; collectives of every kind take these. */
export interface WaitHooks {
  readonly onWait: (waitedMs: number) => void;
  readonly onResume: () => void;
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
  readonly #abort: (code: number) => void;

  constructor(
    identity: RankIdentity,
    device: Device,
    options: WorldOptions,
    open: (hooks: WaitHooks) => { collectives: Collectives; abort: (code: number) => void },
  ) {
    // Until everybody is here there is nobody to blame.
    let monitor: RankMonitor | null = null;
    const { collectives, abort } = open({
      onWait: (waitedMs) => monitor?.look(waitedMs),
      onResume: () => monitor?.resume(),
    });
    this.identity = identity;
    this.collectives = collectives;
    this.rank = collectives.rank;
    this.size = collectives.world;
    this.#abort = abort;
    this.together = new Together(device, collectives);
    this.members = this.together
      .gather(JSON.stringify({ host: hostname(), pid: process.pid }))
      .map((text) => JSON.parse(text) as Member);
    monitor = new RankMonitor({ rank: this.rank, members: this.members, ...options });
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
    this.collectives.close();
  }

  /** Ends all ranks at once, with this exit code where the launcher passes it on. */
  abort(code: number): void {
    this.#abort(code);
  }
}

/** Joins the other ranks. `identity` is that of a process among several. */
export function openWorld(identity: RankIdentity, device: Device, options: WorldOptions): World {
  if (device instanceof CpuDevice) return openMpiWorld(identity, device, options);
  throw new UsageError('several ranks on GPUs are not part of this version; use --device cpu, or --ddp 0');
}

function openMpiWorld(identity: RankIdentity, device: CpuDevice, options: WorldOptions): World {
  const { launcher, world, rank } = identity;
  if (launcher === 'torchrun' && process.env['OMPI_COMM_WORLD_SIZE'] === undefined)
    throw new UsageError(
      'RANK and WORLD_SIZE: ranks on CPUs meet through MPI, which torchrun does not start; ' +
        `use \`trefoil launch -n ${world} -- train …\` or \`mpirun -n ${world} npx trefoil train …\``,
    );
  return new World(identity, device, options, (hooks) => {
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
    return { collectives, abort: (code) => collectives.abortWith(code) };
  });
}

/** Threads of this rank when the config leaves them open: its cores, or its share of the machine's. */
export function threadsOfRank({ localWorld }: RankIdentity): number {
  const cores = availableParallelism();
  const isBound = cores < cpus().length;
  return isBound || localWorld === null ? cores : Math.max(1, Math.floor(cores / localWorld));
}
