/** The processes (ranks) of a run: who they are, how they communicate, and how they end when one of them is lost. */
import { availableParallelism, cpus, hostname, networkInterfaces } from 'node:os';
import type { Collectives } from '../../device/collectives.js';
import { CpuDevice } from '../../device/cpu/cpu.js';
import { CudaDevice } from '../../device/cuda/cuda.js';
import type { Device } from '../../device/device.js';
import { MpiCollectives } from '../../device/mpi/collectives.js';
import { UsageError } from '../../errors.js';
import type { RunPaths } from '../../run/paths.js';
import { type Agreement, RankAgreement, SingleAgreement } from './agreement.js';
import { RankGuard } from './guard.js';
import type { Lifeline } from './guard-shared.js';
import { describeIdentity, type RankIdentity, resolveRank } from './identity.js';
import { RankMonitor, type WatchedRun, type WorldMember } from './monitor.js';
import { meetOnGpus } from './nccl.js';
import { createSecret } from './secret.js';

/** MPI, too, uses any free port. */
const ANY_PORT = 0;

/** Options of `openWorld`. */
export interface WorldOptions {
  /** Seconds a rank waits for the others before it looks for the rank to blame and gives up. */
  readonly timeoutSeconds: number;
}

/** Hooks that collectives call while an exchange waits. */
export interface WaitHooks {
  readonly onWait: (waitedMs: number) => void;
  readonly onResume: () => void;
}

export interface OpenedRanks {
  readonly collectives: Collectives;
  /** In rank order, if they are already known; otherwise the ranks exchange them. */
  readonly members?: readonly WorldMember[];
  /** A rank whose process is known to have ended. */
  readonly gone?: () => number | null;
  /** A rank that was silent for the whole time limit, because its process or machine is stopped. */
  readonly silent?: () => number | null;
  /** Receives the paths of the run whose files show what the ranks do. */
  readonly watch?: (paths: RunPaths | null) => void;
  readonly close: () => void;
  /** Ends every rank it can reach. */
  readonly abort: (code: number) => void;
  /** The rank that exited without a message, if that can be known. */
  readonly lost?: () => Promise<(WorldMember & { readonly rank: number }) | null>;
}

/** The ranks of a run. A run of one process is a world of size one (`singleWorld`). */
export interface World {
  readonly rank: number;
  readonly size: number;
  /** Whether this is rank 0, which writes the shared files of the run. */
  readonly isFirst: boolean;
  /** Whether this is the first rank of its machine: what it prepares in caches there, the others find. */
  readonly isFirstOfHost: boolean;
  readonly identity: RankIdentity;
  /** In rank order. */
  readonly members: readonly WorldMember[];
  /** Null in a world of size one. */
  readonly collectives: Collectives | null;
  readonly agreement: Agreement;
  /** Names the rank that keeps the others waiting, from the files of the run. */
  readonly monitor: {
    /** Sets the run whose files show what each rank does; null when the run has ended. */
    watch(watched: WatchedRun | null): void;
  };
  /** How many ranks, over which transport, for the first lines of a run; no line in a world of size one. */
  describe(): string[];
  /** Facts about the ranks for env.json; nothing in a world of size one. */
  readonly facts: object;
  /** This rank is about to end without the others: from now on nothing here waits for them. */
  leave(): void;
  /** Every rank calls it at the end. */
  close(): void;
  /** After a failed exchange: describes ranks that exited without a message; empty if unknown. */
  describeLost(): Promise<string>;
  /** Ends all ranks at once, with this exit code where the launcher passes it on. */
  abort(code: number): void;
}

/** The world of a run of one process. */
export function singleWorld(): World {
  const identity: RankIdentity = resolveRank({});
  return {
    rank: 0,
    size: 1,
    isFirst: true,
    isFirstOfHost: true,
    identity,
    collectives: null,
    members: [{ host: hostname(), pid: process.pid }],
    agreement: new SingleAgreement(),
    monitor: { watch: () => {} },
    describe: () => [],
    facts: {},
    leave: () => {},
    close: () => {},
    describeLost: async () => '',
    abort: () => {},
  };
}

class RankWorld implements World {
  readonly identity: RankIdentity;
  readonly rank: number;
  readonly size: number;
  readonly collectives: Collectives;
  readonly agreement: Agreement;
  readonly monitor: RankMonitor;
  readonly members: readonly WorldMember[];
  readonly #opened: OpenedRanks;

  constructor(identity: RankIdentity, device: Device, options: WorldOptions, open: (hooks: WaitHooks) => OpenedRanks) {
    // Until all ranks have joined, no rank can be blamed.
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
    this.agreement = new RankAgreement(device, collectives);
    this.members =
      opened.members ??
      this.agreement
        .gather(JSON.stringify({ host: hostname(), pid: process.pid }))
        .map((text) => JSON.parse(text) as WorldMember);
    const { rank, members } = this;
    const { gone, silent, watch: onWatch } = opened;
    const news = { ...(gone && { gone }), ...(silent && { silent }), ...(onWatch && { onWatch }) };
    monitor = new RankMonitor({ rank, members, ...options, ...news });
    this.monitor = monitor;
  }

  get isFirst(): boolean {
    return this.rank === 0;
  }

  get isFirstOfHost(): boolean {
    return this.members.findIndex(({ host }) => host === this.members[this.rank].host) === this.rank;
  }

  get facts(): object {
    return { ranks: { world: this.size, launcher: this.identity.launcher, members: this.members } };
  }

  describe(): string[] {
    const hosts = [...new Set(this.members.map(({ host }) => host))];
    const where = hosts.length === 1 ? hosts[0] : `${hosts.length} hosts (${hosts.join(', ')})`;
    return [`ranks: ${this.size} over ${this.collectives.kind} on ${where}; ${describeIdentity(this.identity)}`];
  }

  leave(): void {
    this.collectives.leave();
  }

  close(): void {
    this.monitor.watch(null);
    this.#opened.close();
  }

  async describeLost(): Promise<string> {
    const lost = await this.#opened.lost?.();
    return lost ? `rank ${lost.rank} on ${lost.host} (pid ${lost.pid}) is gone` : '';
  }

  abort(code: number): void {
    this.#opened.abort(code);
  }
}

/** Joins the other ranks; `identity` is that of a process among several. */
export async function openWorld(identity: RankIdentity, device: Device, options: WorldOptions): Promise<World> {
  if (device instanceof CpuDevice) return openMpiWorld(identity, device, options);
  if (device instanceof CudaDevice) return openNcclWorld(identity, device, options);
  throw new UsageError(
    'several ranks on the CPU need native kernels (TREFOIL_KERNELS=native, a C++ compiler), not those in WebAssembly; use --ddp 0',
  );
}

async function openNcclWorld(identity: RankIdentity, device: CudaDevice, options: WorldOptions): Promise<World> {
  let hooks: WaitHooks | null = null;
  const ranks = await meetOnGpus(identity, device, {
    timeoutMs: 1000 * options.timeoutSeconds,
    onWait: (waitedMs) => hooks?.onWait(waitedMs),
    onResume: () => hooks?.onResume(),
  });
  return new RankWorld(identity, device, options, (own) => {
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
  const opened = new RankWorld(identity, device, options, (hooks) => {
    const collectives = new MpiCollectives(device, hooks);
    if (world !== null && collectives.world !== world)
      throw new UsageError(
        `the launcher (${launcher}) started ${world} ranks, but MPI sees ${collectives.world}: ` +
          (launcher === 'slurm'
            ? 'start them with srun --mpi=pmix, or with mpirun'
            : 'use the mpirun of the same MPI library'),
      );
    if (collectives.rank !== rank)
      throw new UsageError(`the launcher (${launcher}) gives rank ${rank}, but MPI gives ${collectives.rank}`);
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

/** Watches ranks on other machines until the run has files; null on one machine, where processes can be looked up. */
async function guardOfHosts({ rank, members, agreement }: World, options: WorldOptions): Promise<RankGuard | null> {
  if (members.every(({ host }) => host === members[0].host)) return null;
  // The gradients go over the same MPI connections: a reader of those needs no key, so they may carry it.
  const key = agreement.share(createSecret());
  const guard = await RankGuard.start({
    rank,
    members,
    ...options,
    key,
    ports: [ANY_PORT],
    addresses: ownAddresses(),
  });
  const offered: Lifeline | null = JSON.parse(agreement.share(JSON.stringify(guard.lifeline)));
  if (rank !== 0 && offered) await guard.hold(offered);
  return guard;
}

/** Addresses by which other machines may reach this one. */
function ownAddresses(): string[] {
  const all = Object.values(networkInterfaces()).flatMap((addresses) => addresses ?? []);
  const outer = all.filter(({ internal, address }) => !internal && !address.startsWith('fe80:'));
  return [...outer.map(({ address }) => address), hostname()];
}

/** Default number of threads of this rank: the cores it is bound to, or its share of the machine's. */
export function threadsOfRank({ localWorld }: RankIdentity): number {
  const cores = availableParallelism();
  const isBound = cores < cpus().length;
  return isBound || localWorld === null ? cores : Math.max(1, Math.floor(cores / localWorld));
}
