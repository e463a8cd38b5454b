/** The folder of a run: where each file lies, and the small files that are replaced as a whole. */
import { readFileSync, rmSync } from 'node:fs';
import { basename, join, resolve } from 'node:path';
import { stringify } from 'yaml';
import { UsageError } from '../errors.js';
import { ensureFolder } from '../folders.js';
import { errorCode, fileError, statOrUndefined, writeFileAtomic } from './atomic.js';
import { collectEnvironment, type RunEnvironment } from './environment.js';
import { toJson } from './json.js';
import { acquireLock, type RunLock } from './lock.js';

/** All names are here and nowhere else. */
export function runPaths(outDir: string) {
  const path = (...names: string[]): string => join(outDir, ...names);
  return {
    training: path('training.csv'),
    val: path('val.csv'),
    kStats: path('k_stats.csv'),
    fallbackCounters: path('fallback_counters.csv'),
    heartbeat: (rank: number): string => path(`heartbeat_rank${rank}.jsonl`),
    section: (rank: number): string => path(`.section_rank${rank}`),
    metrics: path('metrics.json'),
    env: path('env.json'),
    config: path('config.yaml'),
    checkpoints: path('checkpoints'),
    latest: path('checkpoints', 'latest'),
    model: path('model.safetensors'),
    modelConfig: path('config.json'),
    tensorboard: path('tb'),
    halt: path('.HALT'),
    anomalyType: path('.anomaly_type'),
    gateCollapseDetails: path('gate_collapse_details.json'),
    stackdump: (label: string): string => path(`stackdump_${label}.txt`),
    lock: path('.lock'),
  } as const;
}

export type RunPaths = ReturnType<typeof runPaths>;

/** A run folder opened for writing. */
export class RunFolder {
  readonly path: string;
  readonly paths: RunPaths;
  readonly #lock: RunLock | undefined;

  /**
   * Creates the folder if need be. The first rank locks it; the others of the same run do not, since they write only files
   * of their own.
   */
  constructor(outDir: string, rank = 0) {
    this.path = resolve(outDir);
    this.paths = runPaths(this.path);
    const facts = statOrUndefined(this.path);
    if (facts && !facts.isDirectory()) throw new UsageError(`${this.path}: is not a folder; choose another out_dir`);
    try {
      ensureFolder(this.path);
    } catch (error) {
      throw fileError('create', this.path, error);
    }
    if (rank === 0) this.#lock = acquireLock(this.paths.lock);
  }

  writeMetrics(metrics: Readonly<Record<string, unknown>>): void {
    writeFileAtomic(this.paths.metrics, `${toJson(metrics, 2)}\n`);
  }

  /** `more` adds what only the caller knows, such as the device and its driver. */
  writeEnvironment(
    more: Readonly<Record<string, unknown>> = {},
    environment: RunEnvironment = collectEnvironment(),
  ): void {
    writeFileAtomic(this.paths.env, `${toJson({ ...environment, ...more }, 2)}\n`);
  }

  /** The resolved config: with it the run can be repeated. */
  writeConfig(config: Readonly<Record<string, unknown>>): void {
    writeFileAtomic(this.paths.config, stringify(config));
  }

  close(): void {
    this.#lock?.release();
  }
}

/** The reason to halt, or undefined. Any .HALT counts, also an empty one made by `touch`. */
export function readHalt(outDir: string): string | undefined {
  return readMark(runPaths(outDir).halt);
}

export function writeHalt(outDir: string, reason: string): void {
  writeFileAtomic(runPaths(outDir).halt, `halt: ${oneLine(reason)}\n`);
}

export function readAnomaly(outDir: string): string | undefined {
  return readMark(runPaths(outDir).anomalyType);
}

export function writeAnomaly(outDir: string, type: string): void {
  writeFileAtomic(runPaths(outDir).anomalyType, `${oneLine(type)}\n`);
}

/** Removes .HALT and .anomaly_type, as a start after a halt does. */
export function clearMarks(outDir: string): void {
  const { halt, anomalyType } = runPaths(outDir);
  for (const path of [halt, anomalyType]) rmSync(path, { force: true });
}

/** The text of a small control file without its label; looked at every step, so a missing file is the fast path. */
function readMark(path: string): string | undefined {
  if (!statOrUndefined(path)) return undefined;
  try {
    return (
      readFileSync(path, 'utf8')
        .trim()
        .replace(/^halt:\s*/, '') || 'no reason given'
    );
  } catch (error) {
    if (errorCode(error) === 'ENOENT') return undefined;
    // Somebody put it there, and that is the message; why it cannot be read is only a detail.
    return `${basename(path)} cannot be read: ${errorCode(error) ?? String(error)}`;
  }
}

function oneLine(text: string): string {
  return text.replace(/\s+/g, ' ').trim();
}
