/** Downloads a model of the hub into the cache of this machine. */
import { renameSync, rmSync, statfsSync, symlinkSync } from 'node:fs';
import { dirname, join, relative } from 'node:path';
import type { Environment } from '../environment.js';
import { TrefoilError, UsageError } from '../errors.js';
import { asideName, ensureFolder, errorCode, fileError, readText, statOrUndefined, writeFileAtomic } from '../files.js';
import { type HubAccess, hubAccess } from './access.js';
import { type CachePaths, cachePaths, findSnapshot, hubCacheFolder, missingFile } from './cache.js';
import { type DownloadEvents, downloadBlob, hasBlob, removeDamaged } from './download.js';
import { AccessRefused, describeUrl, type HttpOptions, SourceGaveUp, withDeadline } from './http.js';
import { fetchCommit, listTree, type TreeEntry } from './listing.js';
import { type HubFile, MODEL_FILES, shardsOf, smallFiles, weightFiles } from './model-files.js';
import { formatHubName, type HubName, isCommit, parseHubName } from './name.js';

/** Options of `pullModel`. */
export interface PullOptions {
  /** HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are read from it. Default: `process.env`. */
  readonly environment?: Environment;
  /** Called with the bytes downloaded so far and with all that are missing. */
  readonly onProgress?: (done: number, total: number) => void;
  /** Called with a line about something unusual. */
  readonly onWarning?: (text: string) => void;
  /** Ends the download; what has arrived is kept. */
  readonly signal?: AbortSignal;
  /** Seconds without a byte after which the hub is given up. Default: 60. */
  readonly timeout?: number;
}

/** A model in the cache, and what was downloaded for it. */
export interface PulledModel {
  /** The name with the commit, for `loadModel`. */
  readonly name: string;
  readonly commit: string;
  readonly folder: string;
  /** Files of the model that the hub was asked about; 0 if it was not asked. */
  readonly files: number;
  /** Size of the files that were missing. */
  readonly downloaded: number;
}

const TIMEOUT_SECONDS = 60;
const LONGEST_STALL_MS = 15_000;
const FIRST_PAUSE_MS = 250;
/** Downloads of weights at a time. */
const AT_ONCE = 4;
const MORE_TIME = 'allow more with trefoil pull --timeout';

/**
 * Downloads the files of `hf:owner/name[@revision]` that the cache does not have, and returns where they are. A whole commit
 * that is in the cache, and everything with HF_HUB_OFFLINE, is used without asking the hub.
 */
export async function pullModel(text: string, options: PullOptions = {}): Promise<PulledModel> {
  const { environment = process.env, onWarning = () => {} } = options;
  const name = parseHubName(text);
  const cached = findSnapshot(name, environment);
  const usable = cached !== null && missingFile(cached) === null ? cached : null;
  if (isOffline(environment)) {
    if (usable !== null) return { ...usable, files: 0, downloaded: 0 };
    throw new UsageError(
      `${text}: not in the cache ${hubCacheFolder(environment)}, and HF_HUB_OFFLINE is set; unset it to download the model`,
    );
  }
  if (usable !== null && isCommit(name.revision)) return { ...usable, files: 0, downloaded: 0 };
  const access = hubAccess(environment);
  const http = httpOptions(access, options);
  const commit = await findCommit(text, name, access, http).catch((error) => {
    if (!(error instanceof SourceGaveUp) || usable === null) throw error;
    onWarning(`${error.message}; using ${usable.name} from the cache, which may be older`);
    return null;
  });
  if (commit === null) return { ...usable!, files: 0, downloaded: 0 };
  return await new Pull({ ...name, revision: commit }, access, http, options).run(text);
}

/** As Python reads it. */
function isOffline(environment: Environment): boolean {
  return ['1', 'ON', 'YES', 'TRUE'].includes((environment['HF_HUB_OFFLINE'] ?? '').toUpperCase());
}

function httpOptions({ credential }: HubAccess, { timeout = TIMEOUT_SECONDS, signal }: PullOptions): HttpOptions {
  const giveUpAfterMs = 1000 * timeout;
  return {
    credential,
    giveUpAfterMs,
    stallMs: Math.min(LONGEST_STALL_MS, giveUpAfterMs / 3),
    firstPauseMs: FIRST_PAUSE_MS,
    moreTime: MORE_TIME,
    ...(signal && { signal }),
  };
}

function apiOf(access: HubAccess, repository: string): string {
  return `${access.endpoint}/api/models/${repository}`;
}

async function findCommit(text: string, name: HubName, access: HubAccess, http: HttpOptions): Promise<string> {
  const { repository, revision } = name;
  const host = describeUrl(access.endpoint).replace(/\/$/, '');
  try {
    const commit = await fetchCommit(apiOf(access, repository), revision, withDeadline(http));
    if (commit === undefined)
      throw new UsageError(`${text}: ${host} has no model ${repository} with revision ${revision}; check the name`);
    if (isCommit(commit)) return commit;
    throw new SourceGaveUp(`${host} names the commit ${commit}, which is no commit id; is HF_ENDPOINT a hub?`);
  } catch (error) {
    if (!(error instanceof AccessRefused)) throw error;
    // The hub does not tell whether a private model exists.
    throw new UsageError(
      `${text}: ${host} refuses access (HTTP ${error.status}): check the name; for a private model, or one with terms to ` +
        `accept on its page, set HF_TOKEN to a token that may read it`,
      { cause: error },
    );
  }
}

/** The download of one commit. */
class Pull {
  readonly #name: HubName;
  readonly #access: HubAccess;
  readonly #http: HttpOptions;
  readonly #options: PullOptions;
  readonly #paths: CachePaths;
  readonly #abort = new AbortController();
  /** Bytes of each file that was missing at the start. */
  readonly #done = new Map<string, number>();
  #total = 0;

  constructor(name: HubName, access: HubAccess, http: HttpOptions, options: PullOptions) {
    this.#name = name;
    this.#access = access;
    this.#options = options;
    this.#paths = cachePaths(name, options.environment ?? process.env);
    const signals = [this.#abort.signal, ...(http.signal ? [http.signal] : [])];
    this.#http = { ...http, signal: AbortSignal.any(signals) };
  }

  async run(text: string): Promise<PulledModel> {
    const { repository, revision: commit } = this.#name;
    const tree = await listTree(apiOf(this.#access, repository), commit, withDeadline(this.#http));
    const { locks, blobs, refs, snapshots } = this.#paths;
    const folder = join(snapshots, commit);
    for (const path of [locks, blobs, folder]) this.#create(path);
    // The weights come last: where they are, everything is.
    const small = smallFiles(tree, repository);
    await this.#fetchAll(small);
    const weights = this.#weights(tree, folder);
    await this.#fetchAll(weights);
    const { revision } = parseHubName(text);
    if (!isCommit(revision)) this.#point(join(refs, revision), commit);
    return {
      name: formatHubName(this.#name),
      commit,
      folder,
      files: small.length + weights.length,
      downloaded: this.#total,
    };
  }

  #weights(tree: readonly TreeEntry[], folder: string): HubFile[] {
    return weightFiles(tree, shardsOf(join(folder, MODEL_FILES.index)), this.#name.repository);
  }

  /** Downloads what is missing of the files, a few at a time, and links them into the snapshot. */
  async #fetchAll(files: readonly HubFile[]): Promise<void> {
    for (const file of files)
      if (removeDamaged(this.#paths, file))
        this.#options.onWarning?.(`${file.name} in the cache has another size than on the hub; downloading it again`);
    const missing = files.filter((file) => !hasBlob(this.#paths, file) && !this.#isPresent(file));
    this.#total += missing.reduce((sum, { size }) => sum + size, 0);
    this.#expectRoom(missing);
    const waiting = [...missing];
    const work = async () => {
      for (let file = waiting.shift(); file; file = waiting.shift()) await this.#fetch(file);
    };
    const workers = Array.from({ length: AT_ONCE }, () =>
      work().catch((error) => {
        this.#abort.abort(error); // one failed file ends the others
        throw error;
      }),
    );
    const failed = (await Promise.allSettled(workers)).find((result) => result.status === 'rejected');
    if (failed) throw this.#abort.signal.aborted ? this.#abort.signal.reason : failed.reason;
    for (const file of files) this.#link(file);
  }

  async #fetch(file: HubFile): Promise<void> {
    const { onProgress, onWarning = () => {} } = this.#options;
    const { repository, revision } = this.#name;
    const path = encodeURIComponent(file.name);
    const url = `${this.#access.endpoint}/${repository}/resolve/${revision}/${path}`;
    const events: DownloadEvents = {
      onBytes: (bytes) => {
        this.#done.set(file.name, bytes);
        onProgress?.(
          [...this.#done.values()].reduce((sum, one) => sum + one, 0),
          this.#total,
        );
      },
      onWait: (name) => onWarning(`another process downloads ${name}: waiting for it`),
      onWarning,
    };
    await downloadBlob(url, file, this.#paths, this.#http, events);
  }

  /** Whether a snapshot holds the file itself, as on file systems without links. */
  #isPresent({ name, size }: HubFile): boolean {
    const facts = statOrUndefined(this.#inSnapshot(name));
    return facts?.isFile() === true && facts.size === size;
  }

  #inSnapshot(name: string): string {
    return join(this.#paths.snapshots, this.#name.revision, name);
  }

  #link(file: HubFile): void {
    const path = this.#inSnapshot(file.name);
    const target = relative(dirname(path), join(this.#paths.blobs, file.blob));
    if (this.#isPresent(file)) return;
    const aside = asideName(path);
    try {
      rmSync(aside, { force: true });
      symlinkSync(target, aside);
      renameSync(aside, path);
    } catch (error) {
      if (errorCode(error) !== 'EPERM' && errorCode(error) !== 'ENOTSUP') throw fileError('write', path, error);
      throw new UsageError(`${path}: this file system has no symbolic links; set HF_HOME to a folder on another one`, {
        cause: error,
      });
    }
  }

  #point(ref: string, commit: string): void {
    if (readText(ref)?.trim() === commit) return;
    this.#create(dirname(ref));
    writeFileAtomic(ref, commit);
  }

  #create(folder: string): void {
    try {
      ensureFolder(folder);
    } catch (error) {
      throw fileError('create', folder, error);
    }
  }

  /** Refuses a download that does not fit on the disk, before it fills it. */
  #expectRoom(missing: readonly HubFile[]): void {
    const { blobs, root } = this.#paths;
    const here = ({ blob }: HubFile) => statOrUndefined(join(blobs, `${blob}.incomplete`))?.size ?? 0;
    const needed = missing.reduce((sum, file) => sum + Math.max(0, file.size - here(file)), 0);
    const { bavail, bsize, blocks } = statfsSync(blobs);
    if (blocks === 0 || needed <= bavail * bsize) return; // some network file systems do not tell
    const mb = (bytes: number) => `${Math.ceil(bytes / 1e6)} MB`;
    throw new TrefoilError(
      `${root}: ${mb(needed)} are to be downloaded, and the disk has ${mb(bavail * bsize)} left; free some space, or set ` +
        'HF_HOME to a folder on another disk',
    );
  }
}
