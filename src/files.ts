/**
 * Files and folders: errors in one line, whole transfers, replacing a file so that a crash leaves the old content or the new,
 * and content that may be garbage.
 */
import {
  closeSync,
  constants,
  fstatSync,
  fsyncSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  readSync,
  realpathSync,
  renameSync,
  rmSync,
  type Stats,
  statSync,
  writeSync,
} from 'node:fs';
import { homedir } from 'node:os';
import { basename, dirname, extname, join, sep } from 'node:path';
import type { Environment } from './environment.js';
import { TrefoilError, UsageError } from './errors.js';
import { isPlainObject, isShallow } from './json-values.js';
import { pidExists } from './process-identity.js';

/** Node refuses single transfers of 2 GiB and more; smaller pieces also keep the page cache and the hash in step. */
const TRANSFER_BYTES = 64 * 1024 * 1024;

/** Errors of the disk itself: nothing the caller passed is wrong, and the same call may succeed later. */
const DISK_ERRORS = new Map([
  ['ENOSPC', 'no space left on the disk; free some space'],
  ['EDQUOT', 'the disk quota is used up; free some space'],
  ['EIO', 'the disk reports an input/output error; check the hardware (dmesg)'],
  ['EROFS', 'the file system is read-only; remount it or choose another out_dir'],
  ['EFBIG', 'the file system does not take files this large; choose another out_dir'],
]);

/** The errno name ("ENOENT") of a Node file-system error, looked for along the chain of causes. */
export function errorCode(error: unknown): string | undefined {
  for (let current = error; current instanceof Error; current = current.cause) {
    const code = (current as NodeJS.ErrnoException).code;
    if (typeof code === 'string') return code;
  }
  return undefined;
}

/** Whether the error, or a cause of it, came from a system call on a file: everything else is not the disk's doing. */
export function isFileSystemError(error: unknown): boolean {
  for (let current = error; current instanceof Error; current = current.cause) {
    if ((current as NodeJS.ErrnoException).syscall !== undefined) return true;
  }
  return false;
}

export function isDiskError(error: unknown): boolean {
  return DISK_ERRORS.has(errorCode(error) ?? '');
}

/** Whether a path is meant as a file: it has an extension (`.pt`; not a version, as `.2` or `.v2`) and is no folder. */
export function namesFile(path: string): boolean {
  return (
    !path.endsWith('/') && /^\.(?!v\d)[a-z][a-z0-9]*$/i.test(extname(path)) && !statOrUndefined(path)?.isDirectory()
  );
}

/** One line a person can act on, for any error of a file operation. */
export function explainFileError(error: unknown): string {
  const known = DISK_ERRORS.get(errorCode(error) ?? '');
  if (known !== undefined) return known;
  switch (errorCode(error)) {
    case 'ENOENT':
      return 'there is no such file or folder';
    case 'EACCES':
    case 'EPERM':
      return 'permission denied';
    case 'EISDIR':
      return 'it is a folder, not a file';
    case 'ENOTDIR':
      return 'a part of the path is a file, not a folder';
    default:
      return error instanceof Error ? error.message : String(error);
  }
}

/**
 * Turns a file-system error into an error with a one-line message: the disk's fault, or the path's. Anything else (a
 * mistake in the program, a device that failed while handing over data) is passed on as it is.
 */
export function fileError(action: string, path: string, error: unknown): unknown {
  if (error instanceof TrefoilError || (error as NodeJS.ErrnoException)?.syscall === undefined) return error;
  const message = `${path}: cannot ${action}: ${explainFileError(error)}`;
  return isDiskError(error)
    ? new TrefoilError(message, undefined, { cause: error })
    : new UsageError(message, { cause: error });
}

/** The facts of a path, or undefined when nothing is there. */
export function statOrUndefined(path: string): Stats | undefined {
  try {
    return statSync(path, { throwIfNoEntry: false });
  } catch (error) {
    throw fileError('look at', path, error);
  }
}

/** Files that people write by hand, and those of a run. Beyond it a text cannot be held in memory anyway. */
const TEXT_BYTES = 2 ** 29 - 2 ** 10;

export interface LinkOptions {
  /**
   * Symbolic links: followed (default), refused, or followed inside the folder of a model. A stranger's folder must not make
   * the program show or copy files from elsewhere.
   */
  readonly links?: 'followed' | 'refused' | 'in model';
}

export interface OpenFile {
  readonly descriptor: number;
  readonly size: number;
  readonly inode: number;
}

/** Opens a regular file for reading. A folder, a pipe and a device are refused by name: reading them may never end. */
export function openRegularFile(path: string, { links = 'followed' }: LinkOptions = {}): OpenFile {
  let descriptor: number | undefined;
  try {
    if (links === 'in model') expectInModel(path);
    // O_NONBLOCK: opening a pipe without a writer would block.
    const flags = constants.O_RDONLY | constants.O_NONBLOCK | (links === 'refused' ? constants.O_NOFOLLOW : 0);
    descriptor = openSync(path, flags);
    const facts = fstatSync(descriptor);
    if (facts.isDirectory()) throw new UsageError(`${path}: is a folder; name a file`);
    if (!facts.isFile()) throw new UsageError(`${path}: is not a regular file; name a file on disk`);
    return { descriptor, size: facts.size, inode: facts.ino };
  } catch (error) {
    if (descriptor !== undefined) closeSync(descriptor);
    if (errorCode(error) === 'ELOOP' && links === 'refused')
      throw new UsageError(`${path}: is a symbolic link, which is not followed here; put the file itself there`);
    // A socket.
    if (errorCode(error) === 'ENXIO') throw new UsageError(`${path}: is not a regular file; name a file on disk`);
    throw fileError('read', path, error);
  }
}

/** Refuses a file that a link leads to from another folder, unless that is the folder of the blobs of a hub's snapshot. */
function expectInModel(path: string): void {
  const folder = realpathSync(dirname(path));
  const real = realpathSync(path);
  const above = dirname(folder);
  const blobs = basename(above) === 'snapshots' ? [join(dirname(above), 'blobs')] : [];
  if ([folder, ...blobs].some((allowed) => real.startsWith(join(allowed, sep)))) return;
  throw new UsageError(`${path}: is a link that leaves its folder, to ${real}; put the file itself there`);
}

/** Reads from a regular file with `use` and closes it; undefined when the file is missing. */
export function withFile<Result>(
  path: string,
  use: (descriptor: number, size: number, inode: number) => Result,
  options: LinkOptions = {},
): Result | undefined {
  let file: OpenFile;
  try {
    file = openRegularFile(path, options);
  } catch (error) {
    if (errorCode(error) === 'ENOENT') return undefined;
    throw error;
  }
  try {
    return use(file.descriptor, file.size, file.inode);
  } catch (error) {
    throw fileError('read', path, error);
  } finally {
    closeSync(file.descriptor);
  }
}

/** The text of a regular file of at most `limit` bytes; undefined when it is missing. */
export function readText(path: string, { limit = TEXT_BYTES, ...options }: TextOptions = {}): string | undefined {
  return withFile(path, (descriptor, size) => readWhole(path, descriptor, size, limit).toString('utf8'), options);
}

export interface TextOptions extends LinkOptions {
  readonly limit?: number;
}

/** The bytes of a regular file of at most `limit` bytes; throws when it is missing. */
export function readRegularFile(path: string, { limit = TEXT_BYTES, ...options }: TextOptions = {}): Buffer {
  const { descriptor, size } = openRegularFile(path, options);
  try {
    return readWhole(path, descriptor, size, limit);
  } catch (error) {
    throw fileError('read', path, error);
  } finally {
    closeSync(descriptor);
  }
}

function readWhole(path: string, descriptor: number, size: number, limit: number): Buffer {
  if (size > limit) throw new UsageError(`${path}: is too large: ${size} bytes, more than the ${limit} that are read`);
  const bytes = Buffer.alloc(size);
  return bytes.subarray(0, readFully(descriptor, bytes, 0));
}

/** The text of a file that a user named: throws when it is missing. */
export function readGivenText(path: string): string {
  try {
    return readFileSync(path, 'utf8');
  } catch (error) {
    throw fileError('read', path, error);
  }
}

/** Copies a regular file; the copy appears complete. */
export function copyFile(from: string, to: string, options: TextOptions = {}): void {
  writeFileAtomic(to, readRegularFile(from, options));
}

/** Writes all of `bytes`, however many calls it takes: one write may be short. */
export function writeFully(descriptor: number, bytes: Uint8Array, onPiece?: (piece: Uint8Array) => void): void {
  for (let offset = 0; offset < bytes.length; ) {
    const length = Math.min(TRANSFER_BYTES, bytes.length - offset);
    const written = writeSync(descriptor, bytes, offset, length);
    onPiece?.(bytes.subarray(offset, offset + written));
    offset += written;
  }
}

/** Fills `target` from `position`; returns the number of bytes read, less than its length only at the end of the file. */
export function readFully(descriptor: number, target: Uint8Array, position: number): number {
  let offset = 0;
  while (offset < target.length) {
    const length = Math.min(TRANSFER_BYTES, target.length - offset);
    const read = readSync(descriptor, target, offset, length, position + offset);
    if (read === 0) break;
    offset += read;
  }
  return offset;
}

/** Makes the names inside a folder durable: after a crash a renamed file is found under its new name. */
export function fsyncDir(path: string): void {
  if (process.platform === 'win32') return; // folders cannot be flushed there
  const descriptor = openSync(path, 'r');
  try {
    fsyncSync(descriptor);
  } finally {
    closeSync(descriptor);
  }
}

/** The name a file has while it is being written; the pid keeps two processes apart, the dot keeps it out of globs. */
export function asideName(path: string): string {
  return join(dirname(path), `.${basename(path)}.tmp-${process.pid}`);
}

/** Replaces `path` by what `write` writes: aside, fsynced (unless `isDurable` is false), renamed. */
export function replaceFile(path: string, write: (descriptor: number) => void, isDurable = true): void {
  const aside = asideName(path);
  try {
    const descriptor = openSync(aside, 'w');
    try {
      write(descriptor);
      if (isDurable) fsyncSync(descriptor);
    } finally {
      closeSync(descriptor);
    }
    renameSync(aside, path);
    if (isDurable) fsyncDir(dirname(path));
  } catch (error) {
    rmSync(aside, { force: true });
    throw fileError('write', path, error);
  }
}

/** Replaces `path` by `content`, durably. */
export function writeFileAtomic(path: string, content: string | Uint8Array): void {
  replaceFile(path, (descriptor) =>
    writeFully(descriptor, typeof content === 'string' ? Buffer.from(content) : content),
  );
}

/** The names in a folder; none if it does not exist. */
export function namesIn(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch (error) {
    if (errorCode(error) === 'ENOENT') return [];
    throw fileError('list', folder, error);
  }
}

/** Files and folders that killed processes left behind; the first group of `pattern` is the pid in their names. */
export function leftBehind(folder: string, pattern: RegExp): string[] {
  const isLeft = (name: string): boolean => {
    const match = pattern.exec(name);
    if (!match) return false;
    const pid = Number(match[1]);
    return pid === process.pid || !pidExists(pid);
  };
  return namesIn(folder)
    .filter(isLeft)
    .map((name) => join(folder, name));
}

/**
 * Creates a folder and its parents; returns true if it did not exist. Throws the system's error. Not
 * `mkdirSync(path, { recursive: true })`, which never returns where a parent refuses (under /proc).
 */
export function ensureFolder(path: string): boolean {
  if (isFolder(path)) return false;
  const parent = dirname(path);
  if (parent !== path) ensureFolder(parent);
  try {
    mkdirSync(path);
    return true;
  } catch (error) {
    // Another process may have created it in between.
    if ((error as NodeJS.ErrnoException).code === 'EEXIST' && isFolder(path)) return false;
    throw error;
  }
}

function isFolder(path: string): boolean {
  return statSync(path, { throwIfNoEntry: false })?.isDirectory() ?? false;
}

/** The folder of everything Trefoil keeps between runs: TREFOIL_CACHE, or `trefoil` in the user's cache folder. */
export function cacheFolder(environment: Environment): string {
  // An empty variable counts as unset: a relative folder would follow the working directory.
  return environment['TREFOIL_CACHE'] || join(environment['XDG_CACHE_HOME'] || join(homedir(), '.cache'), 'trefoil');
}

/** Text shorter than this cannot be nested so deeply that recursive readers run out of stack. */
const SHALLOW_CHARACTERS = 4096;

/**
 * The object in JSON text of a file or a line; undefined if it is not one: after a crash of the machine, garbage is expected.
 * Nor if it is nested deeper than any writer would.
 */
export function parseObject(text: string): Record<string, unknown> | undefined {
  // Garbage may have millions of lines, and errors are slow.
  if (!/^\s*\{/.test(text) || !text.trimEnd().endsWith('}')) return undefined;
  try {
    const parsed: unknown = JSON.parse(text);
    if (text.length > SHALLOW_CHARACTERS && !isShallow(parsed)) return undefined;
    return isPlainObject(parsed) ? parsed : undefined;
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    return undefined;
  }
}

/** Says which other users than this one and root can change a file or folder; null if none can, and on Windows. */
export function othersWith(path: string): string | null {
  const own = process.getuid?.();
  if (own === undefined) return null; // Windows has neither owners nor modes in this sense
  const { uid, mode } = statSync(path);
  if (uid !== own && uid !== 0) return `belongs to another user (uid ${uid})`;
  return (mode & 0o022) === 0 ? null : 'can be written by other users';
}
