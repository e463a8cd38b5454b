/**
 * Who keeps the others waiting. A rank that waits for an exchange says so in its section file, again and again; a rank that
 * died or hangs does not. So whoever waits can name the one to blame: rank, host, and what it was doing.
 */
import { hostname } from 'node:os';
import { ExitCode, TrefoilError } from '../errors.js';
import { processState } from '../run/process-identity.js';
import type { RunPaths } from '../run/run-paths.js';
import { readSection, type Section } from '../run/section.js';

/** A rank is gone or hangs; the message names it. The others cannot go on without it. */
export class RankLost extends TrefoilError {
  /** What .anomaly_type says. */
  readonly anomaly: 'rank_gone' | 'rank_stall';

  constructor(message: string, anomaly: RankLost['anomaly']) {
    super(message, ExitCode.failed);
    this.anomaly = anomaly;
  }
}

export interface Member {
  readonly host: string;
  readonly pid: number;
}

export interface MonitorOptions {
  readonly rank: number;
  /** By rank. */
  readonly members: readonly Member[];
  /** Seconds of waiting after which a rank that is not waiting itself hangs. */
  readonly timeoutSeconds: number;
  readonly clock?: () => number;
  /** A rank of any machine whose process is known to have ended. */
  readonly gone?: () => number | null;
  /** A rank of any machine of which nothing was heard for the whole time limit, though it is to be heard even when busy. */
  readonly silent?: () => number | null;
  /** Hears of `watch`. */
  readonly onWatch?: (paths: RunPaths | null) => void;
}

/** What the monitor needs of the run, once there is one. */
export interface Watched {
  readonly paths: RunPaths;
  /** Says in the section file that this rank waits, and when it does not any more. */
  readonly waiting: (isWaiting: boolean) => void;
}

/** A wait this long is worth a word in the section file. */
const SLOW_MS = 1000;
/** A rank that waits says so every fraction of a second: one that was silent so long does not run. */
const SILENT_SECONDS = 5;

export class RankMonitor {
  readonly #options: MonitorOptions;
  #watched: Watched | null = null;
  #isWaiting = false;

  constructor(options: MonitorOptions) {
    this.#options = options;
  }

  /**
   * From now on waits are judged by the run's files. Null: the run is over. Without them a rank may be busy for long, with
   * a corpus say; but one whose process is gone or stopped does nothing, and is named.
   */
  watch(watched: Watched | null): void {
    this.#watched = watched;
    this.#options.onWatch?.(watched?.paths ?? null);
  }

  /** Called while an exchange waits for others; throws when one of them is to blame. */
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
        : `all ranks wait for each other since ${waited} s: ${names.join('; ')}`;
    throw new RankLost(verdict, 'rank_stall');
  }

  /** An exchange that waited has come to its end. */
  resume(): void {
    if (this.#isWaiting) this.#watched?.waiting(false);
    this.#isWaiting = false;
  }

  #standsStill(other: Member & { rank: number }): boolean {
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

/** Of a process on another host nothing is known. */
function stateOf({ host, pid }: Member): ReturnType<typeof processState> | undefined {
  return host === hostname() ? processState(pid) : undefined;
}

function describe({ rank, host, pid }: Member & { rank: number }, section: Section | undefined): string {
  const where = section ? `section ${section.section} at step ${section.step}` : 'no section known';
  return `rank ${rank} on ${host} (pid ${pid}, ${where})`;
}
