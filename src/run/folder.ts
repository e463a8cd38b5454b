/** The folder of a run, opened for writing: the lock, and the small files that are replaced as a whole. */
import { existsSync, rmdirSync, rmSync } from 'node:fs';
import { dirname, resolve } from 'node:path';
import { UsageError } from '../errors.js';
import { ensureFolder, fileError, isFileSystemError, leftBehind, statOrUndefined, writeFileAtomic } from '../files.js';
import { collectEnvironment, type RunEnvironment } from './environment.js';
import { toJson } from './json.js';
import { acquireLock, type RunLock } from './lock.js';
import { type RunPaths, runPaths } from './paths.js';

/** What `asideName` makes: .NAME.tmp-pid. */
const ASIDE_NAME = /^\..+\.tmp-(\d+)$/;

/** A run folder opened for writing. */
export class RunFolder {
  readonly path: string;
  readonly paths: RunPaths;
  readonly #lock: RunLock | undefined;
  /** Folders that did not exist before, the innermost first. */
  readonly #created: string[] = [];

  /**
   * Creates the folder if need be. The first rank locks it; the others of the same run do not, since they write only files
   * of their own.
   */
  constructor(outDir: string, rank = 0) {
    this.path = resolve(outDir);
    this.paths = runPaths(this.path);
    const facts = statOrUndefined(this.path);
    if (facts && !facts.isDirectory()) throw new UsageError(`${this.path}: is not a folder; choose another out_dir`);
    if (rank === 0) for (let path = this.path; !existsSync(path); path = dirname(path)) this.#created.push(path);
    try {
      ensureFolder(this.path);
    } catch (error) {
      throw fileError('create', this.path, error);
    }
    if (rank === 0) {
      this.#lock = acquireLock(this.paths.lock);
      this.#removeLeftovers();
    }
  }

  /** Files that a killed process had begun: a final model among them is as large as the model. */
  #removeLeftovers(): void {
    for (const path of leftBehind(this.path, ASIDE_NAME)) {
      // A pid says nothing of other machines that see this folder: what was touched just now may be theirs.
      const facts = statOrUndefined(path);
      if (facts && Date.now() - facts.mtimeMs > 60_000) rmSync(path, { force: true });
    }
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

  /** The resolved config as YAML: with it the run can be repeated. */
  writeConfig(yaml: string): void {
    writeFileAtomic(this.paths.config, yaml);
  }

  /** Releases the lock, and removes a folder that was created for a run that never began. */
  close(): void {
    this.#lock?.release();
    for (const path of this.#created) {
      try {
        rmdirSync(path);
      } catch (error) {
        if (!isFileSystemError(error)) throw error;
        return; // not empty: the run has begun
      }
    }
  }
}
