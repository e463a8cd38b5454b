/**
 * One look at a run from outside: what watch, health, check, status and report know comes from here. A file that is being
 * written, rotated, truncated or missing is an ordinary sight; one that cannot be read is named in `problems`, and the rest
 * of the view stands. Only the ends of growing files are read.
 */
import { basename, join, resolve } from 'node:path';
import { TrefoilError, UsageError } from '../errors.js';
import { namesIn, parseObject, readText, statOrUndefined } from '../files.js';
import { type LockOwner, readLockOwner } from './lock.js';
import { type CsvRow, type CsvSchema, TRAINING_CSV, tailCsv, VAL_CSV } from './logs/csv.js';
import { type Heartbeat, readSection, type Section, tailHeartbeats } from './logs/heartbeat.js';
import { type RunPaths, readAnomaly, readHalt, runPaths } from './paths.js';

export interface RankView {
  readonly rank: number;
  /** The newest heartbeats, oldest first. */
  readonly beats: readonly Heartbeat[];
  readonly section: Section | undefined;
}

/** Values of config.yaml; null where it does not say. */
export interface SavedSettings {
  readonly steps: number | null;
  readonly lr: number | null;
  /** data.source */
  readonly source: string | null;
}

export interface RunView {
  readonly dir: string;
  readonly name: string;
  readonly paths: RunPaths;
  /** By rank; never empty, the first may be without heartbeats. */
  readonly ranks: readonly RankView[];
  readonly training: readonly CsvRow<typeof TRAINING_CSV>[];
  readonly val: readonly CsvRow<typeof VAL_CSV>[];
  readonly settings: SavedSettings;
  readonly halt: string | undefined;
  readonly anomaly: string | undefined;
  readonly owner: (LockOwner & { readonly alive: boolean | undefined }) | undefined;
  /** Files that are there and cannot be read. */
  readonly problems: readonly string[];
}

const HEARTBEAT_NAME = /^heartbeat_rank(\d+)\.jsonl$/;
const DEFAULT_BEATS = 256;
const CSV_ROWS = 64;

/** Looks at the run in `dir`; refused when there is no such folder. */
export function readRun(dir: string, { beats = DEFAULT_BEATS } = {}): RunView {
  const path = resolve(dir);
  if (!statOrUndefined(path)?.isDirectory())
    throw new UsageError(`${dir}: there is no such folder; name a run's out_dir`);
  const paths = runPaths(path);
  const problems: string[] = [];
  const attempt = <Value>(otherwise: Value, read: () => Value): Value => {
    try {
      return read();
    } catch (error) {
      if (!(error instanceof TrefoilError)) throw error;
      problems.push(error.message);
      return otherwise;
    }
  };
  const csv = <Schema extends CsvSchema>(file: string, schema: Schema) =>
    attempt([] as CsvRow<Schema>[], () => tailCsv(file, schema, CSV_ROWS).rows);
  const ranks = attempt([0], () => ranksIn(path)).map((rank) => ({
    rank,
    beats: attempt([], () => tailHeartbeats(paths.heartbeat(rank), beats)),
    section: attempt(undefined, () => readSection(paths.section(rank))),
  }));
  // A run that went on with fewer ranks leaves the files of the others behind.
  const world = ranks[0].beats.at(-1)?.world ?? Number.POSITIVE_INFINITY;
  return {
    dir: path,
    name: basename(path),
    paths,
    ranks: ranks.filter(({ rank }, i) => i === 0 || rank < world),
    training: csv(paths.training, TRAINING_CSV),
    val: csv(paths.val, VAL_CSV),
    settings: attempt(NO_SETTINGS, () => savedSettings(paths.config)),
    halt: attempt(undefined, () => readHalt(path)),
    anomaly: attempt(undefined, () => readAnomaly(path)),
    owner: attempt(undefined, () => readLockOwner(paths.lock)),
    problems,
  };
}

function ranksIn(folder: string): number[] {
  const ranks = namesIn(folder)
    .flatMap((name) => HEARTBEAT_NAME.exec(name)?.[1] ?? [])
    .map(Number);
  return ranks.length === 0 ? [0] : ranks.sort((a, b) => a - b);
}

const NO_SETTINGS: SavedSettings = { steps: null, lr: null, source: null };

/** Read with regular expressions: loading the YAML library would slow `status` down. */
export function savedSettings(path: string): SavedSettings {
  const text = readText(path);
  if (text === undefined) return NO_SETTINGS;
  const textOf = (section: string, key: string): string | null => {
    const body = new RegExp(`^${section}:\\n((?:[ \\t].*\\n?)*)`, 'm').exec(text)?.[1] ?? '';
    return new RegExp(`^\\s+${key}: (\\S+)\\s*$`, 'm').exec(body)?.[1] ?? null;
  };
  const numberOf = (section: string, key: string): number | null => {
    const value = Number(textOf(section, key) ?? Number.NaN);
    return Number.isFinite(value) ? value : null;
  };
  return { steps: numberOf('train', 'steps'), lr: numberOf('train', 'lr'), source: textOf('data', 'source') };
}

/** metrics.json, env.json and the like: undefined when missing, or when there is no JSON object in it. */
export function readJsonFile(path: string): Record<string, unknown> | undefined {
  const text = readText(path);
  return text === undefined ? undefined : parseObject(text);
}

/** The folders below `folder` that hold a run, and `folder` itself if it is one. */
export function findRuns(folder: string): string[] {
  const isRun = (dir: string) => {
    const paths = runPaths(dir);
    return [paths.heartbeat(0), paths.training].some((path) => statOrUndefined(path)?.isFile());
  };
  if (isRun(folder)) return [folder];
  if (!statOrUndefined(folder)?.isDirectory())
    throw new UsageError(`${folder}: there is no such folder; name a run, or a folder that holds some, with --dir`);
  return namesIn(folder)
    .sort()
    .map((name) => join(folder, name))
    .filter((path) => statOrUndefined(path)?.isDirectory() && isRun(path));
}
