/** Archives a run, also while it is active: the newest verified checkpoint, and logs up to their last complete line. */
import { once } from 'node:events';
import { closeSync, createWriteStream, fstatSync, lstatSync, renameSync, rmSync, statSync } from 'node:fs';
import { basename, join, relative, resolve, sep } from 'node:path';
import { finished } from 'node:stream/promises';
import { createGzip, type Gzip } from 'node:zlib';
import { readSavedConfig } from '../config/load.js';
import { TrefoilError, UsageError } from '../errors.js';
import { asideName, errorCode, fileError, namesIn, openRegularFile, readFully, statOrUndefined } from '../files.js';
import { isHubName } from '../hub/name.js';
import { findCheckpoint, LATEST_NAME, listCheckpoints } from '../run/checkpoint/read.js';
import { runPaths } from '../run/paths.js';
import { tarEnd, tarHeader, tarPadding } from './tar.js';

export type CheckpointChoice = 'latest' | 'all' | 'none';

/** The JSON of `backup`. */
export interface BackupResult {
  readonly file: string;
  readonly bytes: number;
  readonly files: number;
  /** Steps of the archived checkpoints. */
  readonly checkpoints: readonly number[];
  /** Files that vanished while they were read. */
  readonly missed: readonly string[];
  /** Paths of the config outside the run, as `data.path texts`: a restored run needs them too. Symbolic links of the run. */
  readonly elsewhere: readonly string[];
}

const CHUNK_BYTES = 1024 * 1024;
/** Fast compression: weights hardly compress. */
const GZIP_LEVEL = 1;
/** Logs whose last line may be incomplete after a crash. */
const LINES = /\.(csv|jsonl)$/;
/** Files that have no meaning on another machine. */
const LEFT_OUT = /^(\.lock(\.takeover)?|\.section_rank\d+|.*\.tmp-\d+)$/;

/** Retries when a checkpoint is deleted before it can be opened. */
const ATTEMPTS = 20;

export async function backupRun(dir: string, file: string, choice: CheckpointChoice): Promise<BackupResult> {
  const root = resolve(dir);
  if (!statOrUndefined(root)?.isDirectory())
    throw new UsageError(`${dir}: no such folder; give the train.out_dir of a run`);
  const target = resolve(file);
  if (statOrUndefined(target)) throw new UsageError(`${file}: already exists; give another file with --out`);
  const { checkpoints } = runPaths(root);
  const nameOf = (path: string) => [basename(root), ...relative(root, path).split(sep)].join('/');
  const kept = openCheckpoints(root, choice);
  const links: string[] = [];
  const paths = filesBelow(root, (link) => links.push(nameOf(link)), checkpoints).filter(
    (path) => path !== target && !LEFT_OUT.test(basename(path)),
  );
  const missed: string[] = [];
  const aside = asideName(target);
  const output = createWriteStream(aside, { flags: 'wx' });
  const gzip = createGzip({ level: GZIP_LEVEL });
  gzip.pipe(output);
  // Whichever of the two fails, the wait for both ends.
  const done = Promise.all([finished(output), finished(gzip)]);
  done.catch(() => {}); // awaited below, after the last write
  try {
    let stored = 0;
    for (const { path, descriptor } of kept.flatMap(({ files }) => files)) {
      await store(gzip, descriptor, nameOf(path));
      stored += 1;
    }
    if (kept.length > 0) {
      // Not the file of the run, which may name a newer checkpoint.
      await storeText(gzip, nameOf(join(checkpoints, LATEST_NAME)), `${basename(kept[0].path)}\n`);
      stored += 1;
    }
    for (const path of paths) {
      const descriptor = openUnlessGone(path);
      if (descriptor === undefined) {
        missed.push(nameOf(path));
        continue;
      }
      try {
        await store(gzip, descriptor, nameOf(path));
      } finally {
        closeSync(descriptor);
      }
      stored += 1;
    }
    await write(gzip, tarEnd());
    gzip.end();
    await done;
    renameSync(aside, target);
    const steps = kept.map(({ step }) => step);
    const bytes = statSync(target).size;
    const elsewhere = [...pathsOutside(root), ...links.map((name) => `${name}, a symbolic link`)];
    return { file: target, bytes, files: stored, checkpoints: steps, missed, elsewhere };
  } catch (error) {
    rmSync(aside, { force: true });
    throw fileError('write', file, error);
  } finally {
    closeAll(kept);
    gzip.destroy();
    output.destroy();
  }
}

interface OpenCheckpoint {
  readonly path: string;
  readonly step: number;
  readonly files: { readonly path: string; readonly descriptor: number }[];
}

/**
 * Opens all files of the checkpoints to archive, newest first. An open file can be read to its end even if the run deletes
 * it in the meantime.
 */
function openCheckpoints(root: string, choice: CheckpointChoice): OpenCheckpoint[] {
  if (choice !== 'none') refuseLink(runPaths(root).checkpoints);
  for (let attempt = 1; ; attempt++) {
    const opened: OpenCheckpoint[] = [];
    try {
      for (const { path, step } of chosenCheckpoints(root, choice)) {
        const checkpoint: OpenCheckpoint = { path, step, files: [] };
        opened.push(checkpoint);
        refuseLink(path);
        for (const file of filesBelow(path, refuseLink))
          checkpoint.files.push({ path: file, descriptor: openHere(file) });
        statSync(path); // a folder that went before it was listed would look empty
      }
      return opened;
    } catch (error) {
      closeAll(opened);
      const isGone = errorCode(error) === 'ENOENT';
      if (!isGone) throw fileError('read', runPaths(root).checkpoints, error);
      if (attempt === ATTEMPTS)
        throw new TrefoilError(`${root}: checkpoints are deleted faster than they can be read; raise train.keep_last`);
    }
  }
}

/** The newest checkpoint that verifies, or all. */
function chosenCheckpoints(root: string, choice: CheckpointChoice): { path: string; step: number }[] {
  if (choice === 'none') return [];
  if (choice === 'all') return listCheckpoints(runPaths(root).checkpoints);
  const found = findCheckpoint(root, 'auto');
  return found ? [found] : [];
}

function closeAll(checkpoints: readonly OpenCheckpoint[]): void {
  for (const { descriptor } of checkpoints.flatMap(({ files }) => files)) closeSync(descriptor);
}

/** Files that the config names besides those of the run. */
function pathsOutside(root: string): string[] {
  const { config: path } = runPaths(root);
  if (!statOrUndefined(path)) return [];
  const { data, train } = readSavedConfig(path);
  const { tokenizer } = data;
  const mixed = data.sources?.map(({ name, path }) => [`data.sources.${name}.path`, path] as const) ?? [];
  const named: Readonly<Record<string, string | null>> = {
    'data.path': data.path,
    ...Object.fromEntries(mixed),
    'data.val_path': data.val_path,
    'data.tokenizer': isHubName(tokenizer) || statOrUndefined(tokenizer) ? tokenizer : null,
    'train.init_from': train.init_from,
  };
  return Object.entries(named).flatMap(([key, value]) => (value === null ? [] : `${key} ${value}`));
}

/**
 * All files except the folder `except`. Folders that are deleted in the meantime are skipped. Symbolic links are not
 * followed: in the run of a stranger they lead to files of the user.
 */
function filesBelow(folder: string, onLink: (path: string) => void, except?: string): string[] {
  return namesIn(folder)
    .sort()
    .flatMap((name) => {
      const path = join(folder, name);
      const facts = lstatSync(path, { throwIfNoEntry: false });
      if (path === except) return [];
      if (facts?.isSymbolicLink()) onLink(path);
      if (facts?.isDirectory()) return filesBelow(path, onLink, except);
      return facts?.isFile() ? [path] : [];
    });
}

/** A backup without a checkpoint that is there would be found out when it is needed. */
function refuseLink(path: string): void {
  if (lstatSync(path, { throwIfNoEntry: false })?.isSymbolicLink())
    throw new UsageError(
      `${path}: is a symbolic link, which a backup does not follow; put the folder itself there, or use --checkpoints none`,
    );
}

const openHere = (path: string) => openRegularFile(path, { links: 'refused' }).descriptor;

function openUnlessGone(path: string): number | undefined {
  try {
    return openHere(path);
  } catch (error) {
    if (errorCode(error) === 'ENOENT') return undefined;
    throw error;
  }
}

async function storeText(gzip: Gzip, name: string, text: string): Promise<void> {
  const bytes = Buffer.from(text);
  await write(gzip, tarHeader({ name, size: bytes.length, mtime: Date.now() / 1000 }));
  await write(gzip, bytes);
  await write(gzip, tarPadding(bytes.length));
}

/** Stores exactly the current size of the file. */
async function store(gzip: Gzip, descriptor: number, name: string): Promise<void> {
  const facts = fstatSync(descriptor);
  const size = LINES.test(name) ? endOfLastLine(descriptor, facts.size) : facts.size;
  await write(gzip, tarHeader({ name, size, mtime: facts.mtimeMs / 1000 }));
  for (let position = 0; position < size; position += CHUNK_BYTES) {
    // A file that was truncated is padded with zeros: the archive stays readable, and checkpoint hashes reveal it.
    const chunk = new Uint8Array(Math.min(CHUNK_BYTES, size - position));
    readFully(descriptor, chunk, position);
    await write(gzip, chunk);
  }
  await write(gzip, tarPadding(size));
}

function endOfLastLine(descriptor: number, size: number): number {
  const start = Math.max(0, size - CHUNK_BYTES);
  const end = Buffer.alloc(size - start);
  const newline = end.subarray(0, readFully(descriptor, end, start)).lastIndexOf(0x0a);
  return newline < 0 ? start : start + newline + 1;
}

async function write(gzip: Gzip, bytes: Uint8Array): Promise<void> {
  if (bytes.length === 0) return;
  if (gzip.destroyed || gzip.errored) throw gzip.errored ?? new Error('the archive was closed');
  if (gzip.write(bytes)) return;
  // Aborting removes the listeners of the event that did not occur: an archive has thousands of writes.
  const waiting = new AbortController();
  const { signal } = waiting;
  try {
    await Promise.race([once(gzip, 'drain', { signal }), once(gzip, 'close', { signal })]);
  } finally {
    waiting.abort();
  }
}
