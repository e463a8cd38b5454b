/**
 * From a corpus to token shards: for the cache of text sources and for `data prepare`. The parts of a corpus are tokenised in
 * this process, or by worker threads into a file each, which are joined in order. The shards are the same either way.
 */

import { join } from 'node:path';
import { UsageError } from '../../errors.js';
import { ensureFolder } from '../../files.js';
import type { BuildProgress } from '../loader.js';
import { BlobOpener } from '../sources/blob.js';
import { type FileReport, isUnchanged } from '../sources/files.js';
import { CorpusOrder } from '../sources/order.js';
import type { CorpusSpec } from '../sources/spec.js';
import type { Tokenizer } from '../tokenizer.js';
import { runUnitThreads, type SharedUnits } from '../unit-threads.js';
import { removeFolder } from './folders.js';
import type { ShardIndex } from './format.js';
import { isWhole, partFile, readPart } from './part.js';
import type { FromPrepareWorker, PrepareTask } from './prepare-worker.js';
import { tokeniseUnit, type UnitProgress } from './tokenise.js';
import { ShardWriter } from './writer.js';

/** The program of the worker threads. */
const PREPARE_MODULE = new URL('./prepare-worker.js', import.meta.url);

export interface BuildOptions {
  readonly spec: CorpusSpec;
  readonly tokenizer: Tokenizer;
  /** How `createTokenizer` makes it in another thread. */
  readonly tokenizerName: string;
  readonly workers: number;
  readonly onProgress?: ((progress: BuildProgress) => void) | undefined;
}

const PROGRESS_INTERVAL_MS = 200;

/** Adds the progress of parts, and calls `onProgress` at most every 200 ms and after the last part. */
export class ProgressCounter {
  readonly report: FileReport = { skipped: [], replaced: [] };
  readonly #sums = { documents: 0, tokens: 0, bytes: 0 };
  readonly #total: number;
  readonly #onProgress: BuildOptions['onProgress'];
  #parts: number;
  #last = 0;

  constructor(total: number, done: number, onProgress: BuildOptions['onProgress']) {
    this.#total = total;
    this.#parts = done;
    this.#onProgress = onProgress;
  }

  add({ documents, tokens, bytes, done, skipped, replaced }: UnitProgress): void {
    this.#sums.documents += documents;
    this.#sums.tokens += tokens;
    this.#sums.bytes += bytes;
    if (done) this.#parts++;
    if (skipped !== undefined) this.report.skipped.push(skipped);
    if (replaced !== undefined) this.report.replaced.push(replaced);
    const now = performance.now();
    if (now - this.#last < PROGRESS_INTERVAL_MS && this.#parts < this.#total) return;
    this.#last = now;
    this.#onProgress?.({ ...this.#sums, parts: this.#parts, totalParts: this.#total });
  }
}

/** Writes the shards of a corpus into an existing, empty folder. */
export async function buildShards(
  options: BuildOptions,
  folder: string,
): Promise<{ index: ShardIndex; report: FileReport }> {
  const { spec, tokenizer } = options;
  const order = new CorpusOrder(spec);
  const total = order.unitsPerEpoch;
  const counter = new ProgressCounter(total, 0, options.onProgress);
  const writer = new ShardWriter(folder, tokenizer);
  try {
    let skippedFiles = 0;
    if (options.workers <= 1) {
      const opener = new BlobOpener(spec);
      const send = (progress: UnitProgress) => counter.add(progress);
      for (let unit = 0; unit < total; unit++)
        send(await tokeniseUnit({ order, opener, tokenizer, unit, writer, send }));
      skippedFiles = counter.report.skipped.length;
    } else {
      const units = join(folder, 'units');
      ensureFolder(units);
      const joined = new JoinedUnits(units, writer);
      await tokeniseInThreads(
        options,
        units,
        Array.from({ length: total }, (_, unit) => unit),
        joined,
        counter,
      );
      skippedFiles = joined.skippedFiles;
      await removeFolder(units);
    }
    return { index: await finish(writer, spec, skippedFiles), report: counter.report };
  } catch (error) {
    writer.abandon();
    throw error;
  }
}

/** Writes the index, unless there is no text or a file changed while it was read. */
export async function finish(writer: ShardWriter, spec: CorpusSpec, skippedFiles: number): Promise<ShardIndex> {
  if (writer.documents === 0) {
    const [first, ...others] = spec.files;
    const where = `${first.location}${others.length > 0 ? ` and ${others.length} more` : ''}`;
    const skipped = skippedFiles > 0 ? ` (${skippedFiles} skipped: binary)` : '';
    throw new UsageError(`data.path: no text in ${where}${skipped}; name files with text`);
  }
  await expectUnchanged(spec);
  return writer.finish(skippedFiles);
}

/** Throws if a local file is not what was listed any more. */
export async function expectUnchanged(spec: CorpusSpec): Promise<void> {
  for (const { location: path, size, modified } of spec.files)
    if (modified !== undefined && !(await isUnchanged({ path, size, modified })))
      throw new UsageError(`${path} changed while it was being read; start again when it is complete`);
}

/** Those of `units` whose files are in a folder, whole. */
export function finishedUnits(folder: string, units: readonly number[]): Set<number> {
  return new Set(units.filter((unit) => isWhole(partFile(folder, unit))));
}

/**
 * Tokenises those of the parts `all` that are not done, each into a file of its own in `folder`, and joins all of them
 * meanwhile: this thread has nothing else to do. The threads take the next part by a shared counter, because this one is
 * often busy.
 */
export async function tokeniseInThreads(
  { spec, tokenizerName, workers: count }: Omit<BuildOptions, 'tokenizer'>,
  folder: string,
  all: readonly number[],
  joined: JoinedUnits,
  counter: ProgressCounter,
): Promise<void> {
  const units = all.filter((unit) => !joined.isDone(unit));
  await runUnitThreads<Omit<PrepareTask, keyof SharedUnits>, FromPrepareWorker>({
    module: PREPARE_MODULE,
    name: 'trefoil-prepare',
    units,
    count,
    data: { spec, tokenizer: tokenizerName, folder },
    onMessage: ({ unit, progress }) => {
      counter.add(progress);
      if (progress.done) joined.add(unit);
    },
  });
}

export interface JoinOptions {
  /** Parts that are done already. */
  readonly earlier?: ReadonlySet<number>;
  /** The first part. */
  readonly first?: number;
  /** Parts with which a group of shards begins (groups.ts). */
  readonly groups?: readonly number[];
}

/** Parts as they are joined: appended to `writer` in order, each as soon as it and all before it are done. */
export class JoinedUnits {
  /** Number of skipped files in the parts joined so far. */
  skippedFiles = 0;
  readonly #folder: string;
  readonly #writer: ShardWriter;
  readonly #done: Set<number>;
  readonly #earlier: ReadonlySet<number>;
  readonly #groups: ReadonlySet<number>;
  #next: number;

  constructor(folder: string, writer: ShardWriter, { earlier = new Set(), first = 0, groups = [] }: JoinOptions = {}) {
    this.#folder = folder;
    this.#writer = writer;
    this.#earlier = earlier;
    this.#done = new Set(earlier);
    this.#groups = new Set(groups);
    this.#next = first;
    this.#join();
  }

  isDone(unit: number): boolean {
    return this.#done.has(unit);
  }

  /** A part is done. */
  add(unit: number): void {
    this.#done.add(unit);
    this.#join();
  }

  #join(): void {
    const { type } = this.#writer;
    for (; this.#done.has(this.#next); this.#next++) {
      if (this.#groups.has(this.#next)) this.#writer.startGroup();
      this.skippedFiles += readPart(partFile(this.#folder, this.#next), {
        type,
        verify: this.#earlier.has(this.#next),
        take: (ids, starts) => this.#writer.appendTokens(ids, starts),
      });
    }
  }
}
