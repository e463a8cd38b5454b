/** An archive of a run, taken while it may be going on: newest verified checkpoint, logs up to their last whole line. */
import { once } from 'node:events';
import { createWriteStream, readdirSync, renameSync, rmSync, statSync } from 'node:fs';
import { open } from 'node:fs/promises';
import { basename, join, relative, resolve, sep } from 'node:path';
import { finished } from 'node:stream/promises';
import { createGzip, type Gzip } from 'node:zlib';
import { UsageError } from '../errors.js';
import { asideName, errorCode, fileError, statOrUndefined } from '../run/atomic.js';
import { findCheckpoint } from '../run/checkpoint-find.js';
import { listCheckpoints } from '../run/checkpoint-folder.js';
import { runPaths } from '../run/run-paths.js';
import { tarEnd, tarHeader, tarPadding } from './tar.js';

export type CheckpointChoice = 'latest' | 'all' | 'none';

/** The JSON of `backup`. */
export interface BackupResult {
  readonly file: string;
  readonly bytes: number;
  readonly files: number;
  /** Steps of the checkpoints inside. */
  readonly checkpoints: readonly number[];
  /** Files that vanished while they were read. */
  readonly missed: readonly string[];
}

const CHUNK_BYTES = 1024 * 1024;
/** Weights hardly compress: speed matters more. */
const GZIP_LEVEL = 1;
/** Logs grow by whole lines, but a crash may have left half of one at the end. */
const LINES = /\.(csv|jsonl)$/;
/** Of this machine and moment only. */
const LEFT_OUT = /^(\.lock(\.takeover)?|\.section_rank\d+|.*\.tmp-\d+)$/;

export async function backupRun(dir: string, file: string, choice: CheckpointChoice): Promise<BackupResult> {
  const root = resolve(dir);
  if (!statOrUndefined(root)?.isDirectory())
    throw new UsageError(`${dir}: there is no such folder; name a run's out_dir`);
  const target = resolve(file);
  if (statOrUndefined(target)) throw new UsageError(`${file}: exists already; name another file with --out`);
  const { checkpoints } = runPaths(root);
  const steps = chosenSteps(root, choice);
  const isWanted = (path: string) => {
    const [first, second] = relative(root, path).split(sep);
    if (path === target || LEFT_OUT.test(basename(path))) return false;
    return first !== basename(checkpoints) || second === 'latest' || steps.includes(second);
  };
  const paths = filesBelow(root).filter(isWanted);
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
    for (const path of paths) {
      const name = [basename(root), ...relative(root, path).split(sep)].join('/');
      if (await store(gzip, path, name)) stored += 1;
      else missed.push(name);
    }
    await write(gzip, tarEnd());
    gzip.end();
    await done;
    renameSync(aside, target);
    const numbers = steps.map((step) => Number(step.replace('step-', '')));
    return { file: target, bytes: statSync(target).size, files: stored, checkpoints: numbers, missed };
  } catch (error) {
    rmSync(aside, { force: true });
    throw fileError('write', file, error);
  } finally {
    gzip.destroy();
    output.destroy();
  }
}

/** Folder names of the checkpoints to take: the newest one that verifies, or all there are. */
function chosenSteps(root: string, choice: CheckpointChoice): string[] {
  if (choice === 'none') return [];
  if (choice === 'all') return listCheckpoints(runPaths(root).checkpoints).map(({ path }) => basename(path));
  const found = findCheckpoint(root, 'auto');
  return found ? [basename(found.path)] : [];
}

function filesBelow(folder: string): string[] {
  return readdirSync(folder, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath ?? entry.path, entry.name))
    .sort();
}

/** Stores exactly the bytes there are now; false when the file is gone. */
async function store(gzip: Gzip, path: string, name: string): Promise<boolean> {
  let handle: Awaited<ReturnType<typeof open>>;
  try {
    handle = await open(path, 'r');
  } catch (error) {
    if (errorCode(error) === 'ENOENT') return false;
    throw fileError('read', path, error);
  }
  try {
    const facts = await handle.stat();
    const size = LINES.test(name) ? await endOfLastLine(handle, facts.size) : facts.size;
    await write(gzip, tarHeader({ name, size, mtime: facts.mtimeMs / 1000 }));
    const chunk = Buffer.alloc(Math.min(CHUNK_BYTES, size));
    for (let position = 0; position < size; ) {
      const { bytesRead } = await handle.read(chunk, 0, Math.min(chunk.length, size - position), position);
      // A file cut short meanwhile is filled up with zeros: the archive stays readable, and the hashes of a checkpoint tell.
      const piece = bytesRead > 0 ? chunk.subarray(0, bytesRead) : Buffer.alloc(Math.min(CHUNK_BYTES, size - position));
      await write(gzip, Uint8Array.from(piece));
      position += piece.length;
    }
    await write(gzip, tarPadding(size));
    return true;
  } finally {
    await handle.close();
  }
}

async function endOfLastLine(handle: Awaited<ReturnType<typeof open>>, size: number): Promise<number> {
  const start = Math.max(0, size - CHUNK_BYTES);
  const { buffer, bytesRead } = await handle.read(Buffer.alloc(size - start), 0, size - start, start);
  const newline = buffer.subarray(0, bytesRead).lastIndexOf(0x0a);
  return newline < 0 ? start : start + newline + 1;
}

async function write(gzip: Gzip, bytes: Uint8Array): Promise<void> {
  if (bytes.length === 0) return;
  if (gzip.destroyed || gzip.errored) throw gzip.errored ?? new Error('the archive was closed');
  if (!gzip.write(bytes)) await Promise.race([once(gzip, 'drain'), once(gzip, 'close')]);
}
