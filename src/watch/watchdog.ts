/**
 * The watchdog: checks a run repeatedly and acts on changes. It runs in a process of its own and communicates by files and
 * signals only, so it works when the trainer hangs, and the trainer never waits for it.
 */
import { TrefoilError } from '../errors.js';
import { errorCode, writeFileAtomic } from '../files.js';
import { isAlive } from '../process-identity.js';
import { toJson } from '../run/json.js';
import { isRunProcess } from '../run/lock.js';
import { readAnomaly, readHalt, writeAnomaly, writeHalt } from '../run/paths.js';
import { type RunView, readRun } from '../run/reader.js';
import { SteadyAges } from './ages.js';
import { dumpProcess } from './dump.js';
import { explainRule } from './explain.js';
import type { Alert } from './notify.js';
import { type Level, type RuleRow, rowInWords } from './row.js';
import { type Finding, healthFindings } from './rules.js';
import { type RunState, runState } from './state.js';
import type { Thresholds } from './thresholds.js';

export interface WatchdogOptions {
  readonly dir: string;
  readonly thresholds: Thresholds;
  /** Write .HALT on a critical alert. */
  readonly halt: boolean;
  readonly ages?: SteadyAges;
  /** Sends a signal; a parameter for tests. */
  readonly signal?: (pid: number, signal: NodeJS.Signals) => void;
}

export interface Tick {
  readonly state: RunState;
  /** Newest step of rank 0; undefined before the first heartbeat. */
  readonly step: number | undefined;
  readonly rows: readonly RuleRow[];
  /** Rules that got worse since the previous check. */
  readonly alerts: readonly Alert[];
  /** Rules that were reported and have been green for a while. */
  readonly recovered: readonly RuleRow[];
  /** Actions taken on the alerts, one line each. */
  readonly actions: readonly string[];
}

/** The last report about a rule, and for how many looks it has been better since. */
interface Raised {
  readonly level: Level;
  calmLooks: number;
}

/** Five minutes at the usual interval. */
const CALM_LOOKS = 10;
const SEVERITY: Record<Level, number> = { green: 0, yellow: 1, red: 2 };
/** Rules on which halting is pointless, because no process would read the file. */
const BEYOND_HALT = new Set(['process', 'halt', 'anomaly', 'files']);
const GATE_BEATS = 20;
/** Fields of the newest heartbeats in gate_collapse_details.json. */
const GATE_DETAILS = [
  ...(['step', 'gate_entropy_mean', 'gate_entropy_min', 'gate_max_gate', 'gate_collapse_frac'] as const),
  ...(['gate_branch_shares', 'grad_norm'] as const),
];

export class Watchdog {
  readonly #options: WatchdogOptions;
  readonly #ages: SteadyAges;
  readonly #raised = new Map<string, Raised>();
  /** Anomalies whose files were written: two rules may see one collapse. */
  readonly #marked = new Set<string>();
  /** The anomaly this watchdog wrote itself, which must not raise another alert. */
  #ownAnomaly: string | undefined;
  #pid: number | undefined;

  constructor(options: WatchdogOptions) {
    this.#options = options;
    this.#ages = options.ages ?? new SteadyAges();
  }

  /** Checks the run once. Throws a TrefoilError if the folder contains no run. */
  tick(): Tick {
    const view = readRun(this.#options.dir);
    this.#forgetFormerProcess(view);
    const ageOf = this.#ages.look();
    const findings = healthFindings(view, this.#options.thresholds, ageOf);
    const worse = findings.filter((finding) => {
      const isOwnMark = finding.rule === 'anomaly' && view.anomaly === this.#ownAnomaly;
      const isOwnHalt = finding.rule === 'halt' && this.#ownAnomaly !== undefined;
      return this.#raise(finding) && !isOwnMark && !isOwnHalt;
    });
    const recovered = findings.filter((finding) => this.#recovers(finding));
    const state = runState(view, ageOf);
    const actions = worse.filter(({ level }) => level === 'red').flatMap((finding) => this.#act(view, state, finding));
    const iso = new Date().toISOString();
    return {
      state,
      step: view.ranks[0].beats.at(-1)?.step,
      rows: findings,
      alerts: worse.map((finding) => {
        const { rule, level, value, limit, rank } = finding;
        const name = level === 'red' ? 'CRITICAL' : 'warning';
        const where = view.ranks.length > 1 ? ` rank ${rank}` : '';
        const line = `${name} ${view.name}${where}: ${rowInWords(finding)}. ${explainRule(rule)}`;
        return { run: view.name, rank, rule, level, value, limit, line, iso };
      }),
      recovered,
      actions,
    };
  }

  /** Whether the level of a rule is higher than what was reported last. */
  #raise({ rule, level }: Finding): boolean {
    const raised = this.#raised.get(rule);
    if (level === 'green' || (raised && SEVERITY[level] < SEVERITY[raised.level])) return false;
    const isWorse = raised === undefined || SEVERITY[level] > SEVERITY[raised.level];
    this.#raised.set(rule, { level, calmLooks: 0 });
    return isWorse;
  }

  /** Whether a rule that was reported has been better for CALM_LOOKS: one that flaps is reported once. */
  #recovers({ rule, level, anomaly }: Finding): boolean {
    const raised = this.#raised.get(rule);
    if (raised === undefined || level === raised.level) return false;
    raised.calmLooks += 1;
    if (raised.calmLooks < CALM_LOOKS) return false;
    if (level === 'green') this.#raised.delete(rule);
    else this.#raised.set(rule, { level, calmLooks: 0 });
    this.#marked.delete(anomaly);
    return level === 'green';
  }

  /** Resets the state when the run was restarted. */
  #forgetFormerProcess({ owner }: RunView): void {
    if (owner?.pid === this.#pid || owner === undefined) return;
    this.#pid = owner.pid;
    this.#raised.clear();
    this.#marked.clear();
    this.#ownAnomaly = undefined;
  }

  /** Writes the marks for a critical finding. Failures are reported and do not suppress the alert. */
  #act(view: RunView, state: RunState, finding: Finding): string[] {
    if (state.kind !== 'running' || BEYOND_HALT.has(finding.rule) || this.#marked.has(finding.anomaly)) return [];
    this.#marked.add(finding.anomaly);
    const lines: string[] = [];
    const attempt = (what: string, action: () => string | undefined) => {
      try {
        const done = action();
        if (done !== undefined) lines.push(done);
      } catch (error) {
        if (!(error instanceof TrefoilError)) throw error;
        lines.push(`${what} failed: ${error.message}`);
      }
    };
    const reason = `${finding.anomaly} rank ${finding.rank}: ${finding.value} (limit ${finding.limit})`;
    attempt('the mark', () => {
      if (readAnomaly(view.dir) !== undefined) return undefined; // the first name stays
      writeAnomaly(view.dir, finding.anomaly);
      this.#ownAnomaly = finding.anomaly;
      return `wrote ${view.paths.anomalyType}`;
    });
    if (finding.anomaly === 'gate_collapse') attempt('the details', () => writeGateDetails(view, finding));
    if (finding.anomaly.endsWith('_stall')) attempt('the dump', () => this.#dump(view, finding, reason));
    if (this.#options.halt)
      attempt('the halt', () => {
        if (readHalt(view.dir) !== undefined) return undefined;
        writeHalt(view.dir, reason);
        return `wrote ${view.paths.halt}`;
      });
    return lines;
  }

  /** Dumps the kernel's view of the process, and asks the trainer for its own dump by SIGUSR1. */
  #dump({ dir, owner, paths, ranks }: RunView, { rank }: Finding, reason: string): string | undefined {
    const seen = ranks.find((one) => one.rank === rank);
    const pid = seen?.section?.pid ?? seen?.beats.at(-1)?.pid;
    if (pid === undefined || owner === undefined || isAlive(owner) !== true) return undefined;
    const path = dumpProcess(paths, rank, pid, reason);
    const send = this.#options.signal ?? sendSignal;
    // Only the owner of the lock certainly handles the signal, and a lock may be forged.
    if (pid === owner.pid && isRunProcess(dir, pid)) send(pid, 'SIGUSR1');
    return `wrote ${path}`;
  }
}

/** Ignores a process that has exited or belongs to another user. */
function sendSignal(pid: number, signal: NodeJS.Signals): void {
  try {
    process.kill(pid, signal);
  } catch (error) {
    if (!['ESRCH', 'EPERM'].includes(errorCode(error) ?? '')) throw error;
  }
}

function writeGateDetails({ ranks, paths }: RunView, finding: Finding): string {
  const beats = ranks.find(({ rank }) => rank === finding.rank)!.beats.filter(({ msg }) => msg === 'progress');
  const recent = beats
    .slice(-GATE_BEATS)
    .map((beat) => Object.fromEntries(GATE_DETAILS.map((name) => [name, beat[name]])));
  const details = {
    iso: new Date().toISOString(),
    rank: finding.rank,
    rule: finding.rule,
    value: finding.value,
    limit: finding.limit,
    step: beats.at(-1)!.step,
    recent,
  };
  writeFileAtomic(paths.gateCollapseDetails, `${toJson(details, 2)}\n`);
  return `wrote ${paths.gateCollapseDetails}`;
}
