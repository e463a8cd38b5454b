/**
 * The hub's cache of this machine, in the layout that Python's huggingface_hub uses too, so that each finds what the other
 * downloaded:
 *
 *     models--owner--name/refs/main              the commit of a branch or tag
 *     models--owner--name/blobs/HASH             the content of a file; HASH.incomplete while it is downloaded
 *     models--owner--name/snapshots/COMMIT/FILE  a link to the blob
 *     .locks/models--owner--name/HASH.lock       locked while a process downloads the blob
 */
import { homedir } from 'node:os';
import { join } from 'node:path';
import type { Environment } from '../environment.js';
import { UsageError } from '../errors.js';
import { readText, statOrUndefined } from '../files.js';
import { MODEL_FILES, shardsOf } from './model-files.js';
import { formatHubName, type HubName, isCommit, isHubName, parseHubName } from './name.js';

/** Paths of one model in the cache. */
export interface CachePaths {
  /** The whole cache. */
  readonly root: string;
  readonly locks: string;
  readonly blobs: string;
  readonly refs: string;
  readonly snapshots: string;
}

/** A model in the cache. */
export interface Snapshot {
  /** The name with its commit. */
  readonly name: string;
  readonly commit: string;
  readonly folder: string;
}

const REF_BYTES = 1000;

/** HF_HUB_CACHE, else `hub` in HF_HOME, else in huggingface in the user's cache folder. */
export function hubCacheFolder(environment: Environment): string {
  const given = environment['HF_HUB_CACHE'] || environment['HUGGINGFACE_HUB_CACHE'];
  if (given) return fromHome(given);
  const caches = environment['XDG_CACHE_HOME'] || join(homedir(), '.cache');
  return join(fromHome(environment['HF_HOME'] || join(caches, 'huggingface')), 'hub');
}

function fromHome(path: string): string {
  return path.replace(/^~(?=\/|$)/, homedir());
}

export function cachePaths({ repository }: Pick<HubName, 'repository'>, environment: Environment): CachePaths {
  const root = hubCacheFolder(environment);
  const folder = `models--${repository.replace('/', '--')}`;
  const inside = (name: string) => join(root, folder, name);
  return {
    root,
    locks: join(root, '.locks', folder),
    blobs: inside('blobs'),
    refs: inside('refs'),
    snapshots: inside('snapshots'),
  };
}

/** The snapshot that the cache has for a name, whole or not; null if it has none. */
export function findSnapshot(name: HubName, environment: Environment): Snapshot | null {
  const { refs, snapshots } = cachePaths(name, environment);
  const commit = isCommit(name.revision)
    ? name.revision
    : readText(join(refs, name.revision), { limit: REF_BYTES })?.trim();
  if (commit === undefined || !isCommit(commit)) return null;
  const folder = join(snapshots, commit);
  if (!statOrUndefined(folder)?.isDirectory()) return null;
  return { name: formatHubName({ ...name, revision: commit }), commit, folder };
}

/** The first file without which the model of a snapshot cannot be loaded; null if all are there. */
export function missingFile({ folder }: Snapshot): string | null {
  const needed = [MODEL_FILES.config, ...(shardsOf(join(folder, MODEL_FILES.index)) ?? [MODEL_FILES.weights])];
  return needed.find((file) => !statOrUndefined(join(folder, file))?.isFile()) ?? null;
}

/**
 * The folder of a model: where a name of the hub lies in the cache of this machine; any other path as it is. Downloads
 * nothing (`pullModel` does).
 */
export function modelFolder(path: string, environment: Environment = process.env): string {
  if (!isHubName(path)) return path;
  const name = parseHubName(path);
  const found = findSnapshot(name, environment);
  const remedy = `download it with: trefoil pull ${path}`;
  if (found === null) throw new UsageError(`${path}: not in the cache ${hubCacheFolder(environment)}; ${remedy}`);
  const missing = missingFile(found);
  if (missing === null) return found.folder;
  throw new UsageError(`${path}: its ${missing} is not in the cache ${hubCacheFolder(environment)}; ${remedy}`);
}
