/**
 * Finds the rank that keeps the others waiting. A rank that waits for an exchange updates its section file several times a
 * second; a rank that died or hangs does not. So every waiting rank can name the lost one: rank, host, and its section.
 */
import { hostname } from 'node:os';
import { ExitCode, TrefoilError } from '../../errors.js';
import { processState } from '../../process-identity.js';
import { readSection, type Section } from '../../run/logs/heartbeat.js';
import type { RunPaths } from '../../run/paths.js';

/** A rank has exited or hangs; the message names it. The other ranks cannot continue without it. */
export class RankLost extends TrefoilError {
  /** Content of .anomaly_type. */
  readonly anomaly: 'rank_gone' | 'rank_stall';

  constructor(message: string, anomaly: RankLost['anomaly']) {
    super(message, ExitCode.failed);
    this.anomaly = anomaly;
  }
}

/** One rank of a world. */
export interface WorldMember {
  readonly host: string;
  readonly pid: number;
}

export interface MonitorOptions {
  readonly rank: number;
  /** In order of rank. */
  readonly members: readonly WorldMember[];
  /** Seconds of waiting after which a rank that is not itself waiting counts as hanging. */
  readonly timeoutSeconds: number;
  readonly clock?: () => number;
  /** A rank on any machine whose process has exited, if known. */
  readonly gone?: () => number | null;
  /** A rank on any machine that has sent no heartbeat for the whole time limit. */
  readonly silent?: () => number | null;
  /** Called by `watch`. */
  readonly onWatch?: (paths: RunPaths | null) => void;
}

/** The part of a run that the monitor uses. */
export interface WatchedRun {
  readonly paths: RunPaths;
  /** Records in the section file whether this rank waits. */
  readonly waiting: (isWaiting: boolean) => void;
}

/** Shorter waits are not recorded in the section file. */
const SLOW_MS = 1000;
/** A waiting rank updates its section file several times a second: one with an older file does not run. */
const SILENT_SECONDS = 5;

export class RankMonitor {
  readonly #options: MonitorOptions;
  #watched: WatchedRun | null = null;
  #isWaiting = false;

  constructor(options: MonitorOptions) {
    this.#options = options;
  }

  /**
   * Sets the run whose files show what each rank does; null when the run has ended. Without files a rank may be busy for
   * any time, for example with a large corpus, and only a process that has exited or is stopped is named.
   */
  watch(watched: WatchedRun | null): void {
    this.#watched = watched;
    this.#options.onWatch?.(watched?.paths ?? null);
  }

  /** Called while an exchange waits for other ranks. Throws `RankLost` if one of them has exited or hangs. */
  look(waitedMs: number): void {
    const { members, rank, timeoutSeconds } = this.#options;
    if (this.#watched && waitedMs >= SLOW_MS) {
      this.#isWaiting = true;
      this.#watched.waiting(true);
    }
    const others = members.map((member, other) => ({ ...member, rank: other })).filter((other) => other.rank !== rank);
    for (const other of others)
      if (other.rank === this.#options.gone?.() || stateOf(other) === 'gone')
        throw new RankLost(`${describe(other, this.#section(other.rank))}: its process is gone`, 'rank_gone');
    if (waitedMs < 1000 * timeoutSeconds) return;
    const waited = Math.round(waitedMs / 1000);
    const blamed = others.filter((other) => this.#standsStill(other) || this.#isStuck(other.rank));
    if (!this.#watched && blamed.length === 0) return;
    const names = (blamed.length > 0 ? blamed : others).map((other) => describe(other, this.#section(other.rank)));
    const verdict =
      blamed.length > 0
        ? `${names.join('; ')}: kept the other ranks waiting for ${waited} s (NSA_PG_TIMEOUT_MIN sets the limit)`
        : `all ranks have been waiting for each other for ${waited} s: ${names.join('; ')}`;
    throw new RankLost(verdict, 'rank_stall');
  }

  /** Called when an exchange that waited has ended. */
  resume(): void {
    if (this.#isWaiting) this.#watched?.waiting(false);
    this.#isWaiting = false;
  }

  #standsStill(other: WorldMember & { rank: number }): boolean {
    return stateOf(other) === 'stopped' || other.rank === this.#options.silent?.();
  }

  #section(rank: number): Section | undefined {
    return this.#watched ? readSection(this.#watched.paths.section(rank)) : undefined;
  }

  #isStuck(rank: number): boolean {
    if (!this.#watched) return false;
    const section = this.#section(rank);
    const now = (this.#options.clock?.() ?? Date.now()) / 1000;
    return section === undefined || section.section !== 'wait' || now - section.ts > SILENT_SECONDS;
  }
}

/** Undefined for a process on another host. */
function stateOf({ host, pid }: WorldMember): ReturnType<typeof processState> | undefined {
  return host === hostname() ? processState(pid) : undefined;
}

function describe({ rank, host, pid }: WorldMember & { rank: number }, section: Section | undefined): string {
  const where = section ? `section ${section.section} at step ${section.step}` : 'no section known';
  return `rank ${rank} on ${host} (pid ${pid}, ${where})`;
}
