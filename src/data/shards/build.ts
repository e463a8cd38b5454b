/**
 * From a corpus to token shards: for the cache of text sources and for `data prepare`. The parts of a corpus are tokenised in
 * this process, or by worker threads into a folder each, which are joined in order. The shards are the same either way.
 */

import { existsSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { type MessagePort, Worker } from 'node:worker_threads';
import { TrefoilError, UsageError } from '../../errors.js';
import { ensureFolder } from '../../files.js';
import { workerFile } from '../../worker-file.js';
import { firstAtLeast } from '../batch.js';
import type { BuildProgress } from '../loader.js';
import { type FromWorker, type PrepareTask, WORKER_MODULE } from '../pipeline/messages.js';
import { failureOf } from '../pipeline/workers.js';
import { BlobOpener } from '../sources/blob.js';
import { type FileReport, isUnchanged } from '../sources/files.js';
import { CorpusOrder } from '../sources/order.js';
import { documentBytes, documentText, openPart } from '../sources/reader.js';
import type { CorpusSpec } from '../sources/spec.js';
import { cutText } from '../sources/text.js';
import { createTokenizer, type Tokenizer } from '../tokenizer.js';
import { partialName, renameDurably } from './folders.js';
import type { ShardIndex } from './format.js';
import { ShardReader } from './reader.js';
import { ShardWriter } from './writer.js';

export interface BuildOptions {
  readonly spec: CorpusSpec;
  readonly tokenizer: Tokenizer;
  /** How `createTokenizer` makes it in another thread. */
  readonly tokenizerName: string;
  readonly workers: number;
  readonly onProgress?: ((progress: BuildProgress) => void) | undefined;
}

/** Joined tokens are copied in pieces of this length. */
const COPIED_TOKENS = 1 << 20;
const PROGRESS_INTERVAL_MS = 200;
/** All tokens of a part in one file. */
const WITHOUT_LIMIT = Number.POSITIVE_INFINITY;

/** Counts of a part, sent while it is being tokenised. Counts are increments since the last message. */
export interface UnitProgress {
  readonly documents: number;
  readonly tokens: number;
  readonly bytes: number;
  readonly done: boolean;
  readonly skipped?: string;
  readonly replaced?: { file: string; count: number };
}

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
      for (let unit = 0; unit < total; unit++)
        await tokeniseUnit({ order, opener, tokenizer, unit, writer, send: (progress) => counter.add(progress) });
      skippedFiles = counter.report.skipped.length;
    } else {
      const units = join(folder, 'units');
      ensureFolder(units);
      const joined = new JoinedUnits(units, writer);
      await tokeniseInThreads(options, units, total, joined, counter);
      skippedFiles = joined.skippedFiles;
      rmSync(units, { recursive: true });
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
  for (const { location: path, size, modified } of spec.files)
    if (modified !== undefined && !(await isUnchanged({ path, size, modified })))
      throw new UsageError(`${path} changed while it was being read; start again when it is complete`);
  return writer.finish(skippedFiles);
}

interface UnitJob {
  readonly order: CorpusOrder;
  readonly opener: BlobOpener;
  readonly tokenizer: Tokenizer;
  readonly unit: number;
  readonly writer: ShardWriter;
  readonly send: (progress: UnitProgress) => void;
}

/** Tokenises one part of the corpus, document after document in the order of the file. */
async function tokeniseUnit({ order, opener, tokenizer, unit, writer, send }: UnitJob): Promise<void> {
  const { file, part } = order.plainUnit(unit);
  const sent = { documents: writer.documents, tokens: writer.tokens };
  let bytes = 0;
  let replaced = 0;
  let isSkipped = false;
  const report = (done: boolean): void => {
    const counts = { documents: writer.documents - sent.documents, tokens: writer.tokens - sent.tokens, bytes };
    sent.documents = writer.documents;
    sent.tokens = writer.tokens;
    bytes = 0;
    send({
      ...counts,
      done,
      ...(done && isSkipped && { skipped: file.name }),
      ...(done && replaced > 0 && { replaced: { file: file.name, count: replaced } }),
    });
  };
  const reader = await openPart({ file, part, textField: order.spec.textField, opener });
  try {
    for (let position = 0; ; ) {
      const block = await reader.read(position);
      if (block === undefined) break;
      replaced += block.replaced ?? 0;
      if (block.skipped !== undefined) isSkipped = true;
      for (const document of block.documents) {
        for (const piece of cutText(documentText(document))) writer.append(tokenizer.encode(piece));
        bytes += documentBytes(document);
        if (!block.isPartial) writer.endDocument();
      }
      position = block.next;
      report(false);
    }
  } finally {
    await reader.close();
  }
  report(true);
}

function unitFolder(folder: string, unit: number): string {
  return join(folder, `unit-${String(unit).padStart(6, '0')}`);
}

export function finishedUnits(folder: string, total: number): Set<number> {
  const done = new Set<number>();
  for (let unit = 0; unit < total; unit++) if (existsSync(unitFolder(folder, unit))) done.add(unit);
  return done;
}

/**
 * Tokenises the parts that are not done, each into a folder of its own in `folder`, and joins all `total` meanwhile: this
 * thread has nothing else to do.
 */
export async function tokeniseInThreads(
  { spec, tokenizerName, workers: count }: Omit<BuildOptions, 'tokenizer'>,
  folder: string,
  total: number,
  joined: JoinedUnits,
  counter: ProgressCounter,
): Promise<void> {
  const open = Array.from({ length: total }, (_, unit) => unit).filter((unit) => !joined.isDone(unit));
  const file = await workerFile(WORKER_MODULE);
  const workerData: PrepareTask = { kind: 'prepare', spec, tokenizer: tokenizerName, folder };
  const workers: Worker[] = [];
  const run = (): Promise<void> =>
    new Promise((resolve, reject) => {
      const worker = new Worker(file, { workerData, name: 'trefoil-prepare' });
      workers.push(worker);
      let unit: number | null = null;
      const receive = (message: FromWorker): void => {
        if (message.kind === 'ready') {
          unit = open.shift() ?? null;
          worker.postMessage(unit);
        } else if (message.kind === 'failed') reject(failureOf(message));
        else if (message.kind === 'unit') {
          counter.add(message.progress);
          if (message.progress.done) joined.add(unit!);
        }
      };
      worker.on('error', (error) => reject(new TrefoilError(`a worker failed: ${error.message}`)));
      worker.on('exit', (code) =>
        code === 0 ? resolve() : reject(new TrefoilError(`a worker ended with code ${code}`)),
      );
      worker.on('message', (message: FromWorker) => {
        try {
          receive(message);
        } catch (error) {
          reject(error);
        }
      });
    });
  try {
    if (open.length > 0) await Promise.all(Array.from({ length: Math.min(count, open.length) }, run));
  } finally {
    await Promise.all(workers.map((worker) => worker.terminate()));
  }
}

/** The program of a worker thread: tokenises the parts whose numbers `port` receives, until it receives null. */
export async function prepareUnits(
  task: PrepareTask,
  port: MessagePort,
  send: (message: FromWorker) => void,
): Promise<void> {
  const order = new CorpusOrder(task.spec);
  const opener = new BlobOpener(task.spec);
  const tokenizer = createTokenizer(task.tokenizer);
  const waiting: ((unit: number | null) => void)[] = [];
  port.on('message', (unit: number | null) => waiting.shift()?.(unit));
  for (;;) {
    const asked = new Promise<number | null>((resolve) => waiting.push(resolve));
    send({ kind: 'ready' });
    const unit = await asked;
    if (unit === null) break;
    const target = unitFolder(task.folder, unit);
    const aside = partialName(target);
    ensureFolder(aside);
    const writer = new ShardWriter(aside, tokenizer, WITHOUT_LIMIT);
    try {
      await tokeniseUnit({
        order,
        opener,
        tokenizer,
        unit,
        writer,
        send: (progress) => {
          if (progress.done) {
            writer.finish(progress.skipped === undefined ? 0 : 1);
            renameDurably(aside, target);
          }
          send({ kind: 'unit', progress });
        },
      });
    } catch (error) {
      writer.abandon();
      rmSync(aside, { recursive: true, force: true });
      throw error;
    }
  }
  port.close();
}

/** Parts as they are joined: appended to `writer` in order, each as soon as it and all before it are done. */
export class JoinedUnits {
  /** Number of skipped files in the parts joined so far. */
  skippedFiles = 0;
  readonly #folder: string;
  readonly #writer: ShardWriter;
  readonly #done: Set<number>;
  #next = 0;

  /** `done`: parts that are done already. */
  constructor(folder: string, writer: ShardWriter, done: ReadonlySet<number> = new Set()) {
    this.#folder = folder;
    this.#writer = writer;
    this.#done = new Set(done);
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
    for (; this.#done.has(this.#next); this.#next++) this.#append(unitFolder(this.#folder, this.#next));
  }

  #append(folder: string): void {
    // The writer of the part computed the hashes moments ago or before an interruption: they are compared here.
    const reader = ShardReader.open(folder);
    const { index, documentStarts } = reader;
    this.skippedFiles += index.skippedFiles;
    try {
      for (let from = 0; from < index.tokens; from += COPIED_TOKENS) {
        const count = Math.min(COPIED_TOKENS, index.tokens - from);
        const [first, end] = [from, from + count].map((position) => firstAtLeast(documentStarts, position));
        const starts = documentStarts.subarray(first, end).map((start) => start - from);
        this.#writer.appendTokens(reader.readTokens(from, count), starts);
      }
    } finally {
      reader.close();
    }
  }
}
