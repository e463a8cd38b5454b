/** The folder of a run, opened for writing: the lock, and the small files that are replaced as a whole. */
import { existsSync, rmdirSync, rmSync } from 'node:fs';
import { basename, dirname, resolve } from 'node:path';
import { UsageError } from '../errors.js';
import { ensureFolder, fileError, isFileSystemError, leftBehind, statOrUndefined, writeFileAtomic } from '../files.js';
import { listCheckpoints } from './checkpoint/read.js';
import { collectEnvironment, type RunEnvironment } from './environment.js';
import { toJson } from './json.js';
import { acquireLock, type RunLock, refuseLiveOwner } from './lock.js';
import { readCsv, TRAINING_CSV } from './logs/csv.js';
import { type RunPaths, runPaths } from './paths.js';

/** The names that `asideName` makes: .NAME.tmp-pid. */
const ASIDE_NAME = /^\..+\.tmp-(\d+)$/;
const OWN_ASIDE = /^\.(config\.yaml|env\.json|metrics\.json|model\.safetensors|config\.json)\.tmp-/;

/** A folder that holds a run is only ever continued, never overwritten. */
export function refuseUsedFolder(outDir: string): void {
  const paths = runPaths(outDir);
  const isUsed =
    listCheckpoints(paths.checkpoints).length > 0 ||
    existsSync(paths.model) ||
    readCsv(paths.training, TRAINING_CSV).rows.length > 0;
  if (!isUsed) return;
  refuseLiveOwner(paths.lock); // which can be neither resumed nor replaced
  throw new UsageError(
    `${outDir} holds a run already: go on with --resume auto or choose another --out-dir ` +
      "(in TypeScript: resume: 'auto' or train.out_dir)",
  );
}

/** A run folder opened for writing. */
export class RunFolder {
  readonly path: string;
  readonly paths: RunPaths;
  readonly #lock: RunLock | undefined;
  #isLockKept = false;
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
      // Only the owner of the lock writes these files. Others may come from a machine whose processes cannot be seen from
      // here: what was touched just now may still be written.
      const isOwn = OWN_ASIDE.test(basename(path));
      const facts = statOrUndefined(path);
      if (facts && (isOwn || Date.now() - facts.mtimeMs > 60_000)) rmSync(path, { force: true });
    }
  }

  /** The lock stays when this process ends: an end that could not be written must look like that of a dead process. */
  keepLock(): void {
    this.#isLockKept = true;
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
    if (!this.#isLockKept) this.#lock?.release();
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
