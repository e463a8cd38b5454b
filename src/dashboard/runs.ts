/**
 * The runs below a folder, as rows of a table. Names are looked up in the listing of the folder and never joined to a path.
 * A row is computed again only when the files of its run changed.
 */
import { type Dirent, readdirSync, statSync } from 'node:fs';
import { basename, join, resolve } from 'node:path';
import { setImmediate } from 'node:timers/promises';
import { TrefoilError } from '../errors.js';
import { errorCode, fileError } from '../files.js';
import { runPaths } from '../run/paths.js';
import { readRun } from '../run/reader.js';
import { wallAges } from '../watch/ages.js';
import type { RuleRow } from '../watch/row.js';
import { healthFindings } from '../watch/rules.js';
import { runStatus } from '../watch/status.js';
import type { Thresholds } from '../watch/thresholds.js';
import type { RunRow } from './answers.js';
import type { LogName } from './chart-data.js';
import { type RunConfig, readConfig } from './run-files.js';
import { RunLog } from './run-log.js';

const RUN_FILES = /^(heartbeat_rank\d+\.jsonl|training\.csv|metrics\.json|env\.json|\.lock|config\.yaml)$/;
/** Names of plain files of a run; anything else under such a name makes the run a broken one. */
const PLAIN_FILES =
  /^(heartbeat_rank\d+\.jsonl|\.section_rank\d+|(training|val|k_stats|fallback_counters|own_metrics|source_metrics)\.csv|(metrics|env|config|gate_collapse_details|needle)\.json|config\.yaml|(samples|attention)\.jsonl|\.lock|\.HALT|\.anomaly_type)$/;
const PLAIN_FOLDERS = new Set(['checkpoints', 'tb', 'traces']);
/** A run whose process may die without changing a file is looked at this often. */
const REFRESH_MS = 5_000;
const SPARK_POINTS = 32;
/** The table is computed in slices of this length, between which other requests are answered. */
const SLICE_MS = 5;
/** Heartbeats that a row is computed from. */
const BEATS = 24;
/** Logs kept in memory; one holds about a megabyte. */
const MAX_LOGS = 96;

/** A run and what is known about it. */
export interface FoundRun {
  readonly name: string;
  readonly dir: string;
}

interface Known extends FoundRun {
  signature: string;
  lookedAt: number;
  row: RunRow;
  /** The signature for which the alerts of `row` were computed, and when. */
  alertsFor: string;
  alertsAt: number;
}

export class Runs {
  readonly dir: string;
  readonly #thresholds: Thresholds;
  readonly #known = new Map<string, Known>();
  readonly #logs = new Map<string, RunLog>();
  #updatingAlerts = false;
  #listing: Promise<RunRow[]> | null = null;

  constructor(dir: string, thresholds: Thresholds) {
    this.dir = resolve(dir);
    this.#thresholds = thresholds;
  }

  /** All runs, by name. A folder that does not exist yet has none. Callers at the same time share one look. */
  async rows(): Promise<RunRow[]> {
    this.#listing ??= this.#list().finally(() => {
      this.#listing = null;
    });
    return await this.#listing;
  }

  /** Lets other requests be answered between runs. */
  async #list(): Promise<RunRow[]> {
    const found: FoundRun[] = [];
    let since = performance.now();
    const yieldToOthers = async () => {
      if (performance.now() - since < SLICE_MS) return;
      await setImmediate();
      since = performance.now();
    };
    for (const candidate of runCandidates(this.dir)) {
      if (isRunFolder(candidate)) found.push(candidate);
      await yieldToOthers();
    }
    const names = new Set(found.map(({ name }) => name));
    for (const name of [...this.#known.keys()]) if (!names.has(name)) this.#known.delete(name);
    const rows: RunRow[] = [];
    for (const run of found) {
      rows.push(this.#refresh(run).row);
      await yieldToOthers();
    }
    return rows;
  }

  /** Looks a name up among the folders that exist now. */
  find(name: string): FoundRun | undefined {
    const candidate = runCandidates(this.dir).find((run) => run.name === name);
    return candidate && isRunFolder(candidate) ? candidate : undefined;
  }

  row(run: FoundRun): RunRow {
    return this.#refresh(run).row;
  }

  /** A log of a run. The least recently used ones are forgotten. */
  log({ dir }: FoundRun, kind: LogName, rank = 0): RunLog {
    const paths = runPaths(dir);
    const path = kind === 'heartbeat' ? paths.heartbeat(rank) : paths[kind];
    let log = this.#logs.get(path);
    if (!log) {
      log = new RunLog(path, kind);
      this.#logs.set(path, log);
    }
    log.usedAt = performance.now();
    if (this.#logs.size > MAX_LOGS) {
      const [oldest] = [...this.#logs].sort(([, a], [, b]) => a.usedAt - b.usedAt);
      this.#logs.delete(oldest[0]);
    }
    return log;
  }

  /** Applies the health rules to runs that changed, one per turn of the event loop; `onChange` is called for each. */
  async updateAlerts(onChange: (row: RunRow) => void = () => {}): Promise<void> {
    if (this.#updatingAlerts) return;
    this.#updatingAlerts = true;
    try {
      for (const known of [...this.#known.values()]) {
        // Rules about time can turn red while no file changes: a run that hangs writes nothing.
        const isOver = known.row.state !== 'running' && known.row.state !== 'gone';
        const isFresh =
          known.alertsFor === known.signature && (isOver || performance.now() - known.alertsAt < REFRESH_MS);
        if (isFresh || known.row.state === 'broken') continue;
        known.alertsFor = known.signature;
        known.alertsAt = performance.now();
        const alerts = this.alerts(known);
        if (JSON.stringify(alerts) !== JSON.stringify(known.row.alerts)) {
          known.row = { ...known.row, alerts };
          onChange(known.row);
        }
        await setImmediate();
      }
    } finally {
      this.#updatingAlerts = false;
    }
  }

  /** The health rules of a run that are not green. */
  alerts(run: FoundRun): RuleRow[] {
    try {
      return healthFindings(readRun(run.dir), this.#thresholds, wallAges()).filter(({ level }) => level !== 'green');
    } catch (error) {
      if (!(error instanceof TrefoilError)) throw error;
      return [{ rule: 'files', level: 'yellow', value: this.hidePaths(error.message), limit: 'readable' }];
    }
  }

  /** Messages name files relative to the served folder. */
  hidePaths(message: string): string {
    return message.replaceAll(`${this.dir}/`, '').replaceAll(this.dir, '.');
  }

  #refresh(run: FoundRun): Known {
    const known = this.#known.get(run.name);
    const now = performance.now();
    const signature = signatureOf(run.dir);
    const isAlive = known?.row.state === 'running';
    if (known && known.signature === signature && !(isAlive && now - known.lookedAt > REFRESH_MS)) return known;
    const row = { ...this.#read(run), alerts: known?.row.alerts ?? [] };
    const next = {
      ...run,
      signature,
      lookedAt: now,
      row,
      alertsFor: known?.alertsFor ?? '',
      alertsAt: known?.alertsAt ?? 0,
    };
    this.#known.set(run.name, next);
    return next;
  }

  #read(run: FoundRun): RunRow {
    const { name, dir } = run;
    const broken = (problem: string): RunRow => ({
      name,
      state: 'broken',
      detail: problem,
      status: 'broken',
      reason: problem,
      advice: '',
      synthetic: null,
      step: null,
      steps: null,
      loss: null,
      val_loss: null,
      tokens_per_s: null,
      seconds_left: null,
      last_beat: null,
      checkpoint: null,
      section: null,
      ranks: [],
      halt: null,
      anomaly: null,
      problems: [problem],
      alerts: [],
      summary: '',
      spark: [],
    });
    try {
      const strange = strangeFile(dir);
      if (strange !== undefined) return broken(strange);
      const now = Date.now() / 1000;
      const { run: _run, dir: _dir, heartbeat_age_s: age, ...status } = runStatus(dir, now, { beats: BEATS });
      return {
        ...status,
        name,
        last_beat: age === null ? null : now - age,
        alerts: [],
        problems: status.problems.map((problem) => this.hidePaths(problem)),
        summary: summaryOf(readConfig(dir)),
        spark: this.#spark(run),
      };
    } catch (error) {
      if (!(error instanceof TrefoilError)) throw error;
      return broken(this.hidePaths(error.message));
    }
  }

  /** Losses of training.csv at evenly spaced positions. */
  #spark(run: FoundRun): number[] {
    return this.log(run, 'training').sample(SPARK_POINTS, 0);
  }
}

/** The folders inside `dir`, by name; `dir` itself if it is a run. Links are not followed. */
function runCandidates(dir: string): FoundRun[] {
  const entries = list(dir);
  if (entries.some((entry) => entry.isFile() && /^(heartbeat_rank\d+\.jsonl|training\.csv)$/.test(entry.name)))
    return [{ name: basename(dir), dir }];
  return entries
    .filter((entry) => entry.isDirectory())
    .map(({ name }) => ({ name, dir: join(dir, name) }))
    .sort((a, b) => (a.name < b.name ? -1 : 1));
}

function isRunFolder({ dir }: FoundRun): boolean {
  return list(dir).some(({ name }) => RUN_FILES.test(name));
}

function list(dir: string): Dirent[] {
  try {
    return readdirSync(dir, { withFileTypes: true });
  } catch (error) {
    const code = errorCode(error);
    if (code === 'ENOENT' || code === 'EACCES' || code === 'ENOTDIR') return [];
    throw fileError('list', dir, error);
  }
}

/** Names the first entry that is not the kind of file its name promises: readers of a run expect plain files. */
function strangeFile(dir: string): string | undefined {
  for (const entry of list(dir)) {
    if (PLAIN_FILES.test(entry.name) && !entry.isFile())
      return `${entry.name}: is a ${kindOf(entry)}, not a regular file`;
    if (PLAIN_FOLDERS.has(entry.name) && !entry.isDirectory())
      return `${entry.name}: is a ${kindOf(entry)}, not a folder`;
  }
  return undefined;
}

function kindOf(entry: Dirent): string {
  if (entry.isSymbolicLink()) return 'symbolic link';
  if (entry.isDirectory()) return 'folder';
  return entry.isFile() ? 'file' : 'special file';
}

/** Changes with the files that a row is computed from, except section files and heartbeats of other ranks. */
function signatureOf(dir: string): string {
  const paths = runPaths(dir);
  const files = [
    paths.heartbeat(0),
    paths.training,
    paths.val,
    paths.halt,
    paths.anomalyType,
    paths.lock,
    paths.config,
  ];
  return [...files, paths.latest]
    .map((path) => {
      try {
        const facts = statSync(path, { throwIfNoEntry: false });
        return facts ? `${facts.size} ${facts.mtimeMs}` : '';
      } catch (error) {
        return errorCode(error) ?? String(error); // a folder that may not be entered: reading it explains why
      }
    })
    .join('|');
}

/** `4 layers × 128 · nsa · 2048 tokens · lr 0.0003 · text` */
function summaryOf({ values }: RunConfig): string {
  const value = (key: string) => values.get(key);
  const parts = [
    value('model.n_layers') && `${value('model.n_layers')} layers × ${value('model.dim')}`,
    value('model.attention'),
    value('train.seq_len') && `${value('train.seq_len')} tokens`,
    value('train.lr') && `lr ${value('train.lr')}`,
    value('data.source'),
  ];
  return parts.filter(Boolean).join(' · ');
}
