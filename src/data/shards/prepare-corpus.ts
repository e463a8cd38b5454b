/**
 * `data prepare`: a corpus to token shards, with several threads, and resumable. Every part of the corpus becomes a folder of
 * its own beside the target; parts that are there already are not done again. At the end the token files are linked
 * together under one index, the whole gets its name by a rename, and what the parts left is removed. The shards are the
 * same for any number of threads and interruptions.
 */

import { createHash } from 'node:crypto';
import {
  closeSync,
  existsSync,
  fsyncSync,
  linkSync,
  openSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { join } from 'node:path';
import { Worker } from 'node:worker_threads';
import { TrefoilError, UsageError } from '../../errors.js';
import { ensureFolder } from '../../folders.js';
import { pidExists } from '../../process-identity.js';
import { CorpusOrder, corpusIdentity } from '../corpus/order.js';
import type { CorpusSpec } from '../corpus/spec.js';
import type { FromWorker, PrepareTask } from '../pipeline/messages.js';
import { workerFile } from '../pipeline/worker-file.js';
import { failureOf } from '../pipeline/workers.js';
import { createTokenizer } from '../tokenizer.js';
import { encodeIndex, INDEX_NAME, type ShardFile, type ShardIndex } from './format.js';
import { renameDurably } from './prepare.js';
import { unitFolder } from './prepare-units.js';
import { ShardReader } from './reader.js';

export interface CorpusProgress {
  readonly documents: number;
  readonly tokens: number;
  readonly bytes: number;
  readonly parts: number;
  readonly totalParts: number;
}

export interface PrepareCorpusOptions {
  readonly spec: CorpusSpec;
  readonly tokenizer: string;
  readonly folder: string;
  readonly workers: number;
  readonly onProgress?: (progress: CorpusProgress) => void;
  readonly onNote?: (line: string) => void;
}

export async function prepareCorpus(options: PrepareCorpusOptions): Promise<ShardIndex> {
  const { spec, folder } = options;
  if (existsSync(folder) && readdirSync(folder).length > 0)
    throw new UsageError(`${folder} is not empty; name a new folder for the shards, or remove it`);
  const working = `${folder}.preparing`;
  ensureFolder(working);
  const release = takeOver(working);
  try {
    checkPlan(working, options);
    const { unitsPerEpoch: total } = new CorpusOrder(spec);
    const done = finishedUnits(working, total);
    if (done.size > 0) options.onNote?.(`${done.size} of ${total} parts are there already`);
    await tokeniseUnits(options, working, total, done);
    const index = joinUnits(working, total, options.tokenizer);
    renameDurably(join(working, 'final'), folder);
    release();
    rmSync(working, { recursive: true, force: true });
    return index;
  } finally {
    release();
  }
}

/** One process at a time; what a dead one left is taken over. */
function takeOver(working: string): () => void {
  const path = join(working, 'owner');
  const owner = existsSync(path) ? Number(readFileSync(path, 'utf8')) : 0;
  if (owner > 0 && owner !== process.pid && pidExists(owner))
    throw new UsageError(`${working} is in use by process ${owner}; wait for it or choose another --out`);
  writeFileSync(path, `${process.pid}\n`);
  return () => rmSync(path, { force: true });
}

/** Parts of another corpus, or by another tokenizer, must not be mixed in. */
function checkPlan(working: string, { spec, tokenizer }: PrepareCorpusOptions): void {
  const path = join(working, 'plan');
  const plan = corpusIdentity(spec, createTokenizer(tokenizer).identity);
  if (!existsSync(path)) writeFileSync(path, plan);
  else if (readFileSync(path, 'utf8') !== plan)
    throw new UsageError(`${working} holds parts of another corpus or tokenizer; remove it or choose another --out`);
}

function finishedUnits(working: string, total: number): Set<number> {
  const done = new Set<number>();
  for (let unit = 0; unit < total; unit++) if (existsSync(unitFolder(working, unit))) done.add(unit);
  return done;
}

async function tokeniseUnits(
  options: PrepareCorpusOptions,
  working: string,
  total: number,
  done: ReadonlySet<number>,
): Promise<void> {
  const open = Array.from({ length: total }, (_, unit) => unit).filter((unit) => !done.has(unit));
  const sums = { documents: 0, tokens: 0, bytes: 0, parts: done.size };
  const file = await workerFile();
  const { spec, tokenizer, onProgress } = options;
  const workerData: PrepareTask = { kind: 'prepare', spec, tokenizer, folder: working };
  const workers: Worker[] = [];
  const run = (): Promise<void> =>
    new Promise((resolve, reject) => {
      const worker = new Worker(file, { workerData, name: 'trefoil-prepare' });
      workers.push(worker);
      worker.on('error', (error) => reject(new TrefoilError(`a worker failed: ${error.message}`)));
      worker.on('exit', (code) =>
        code === 0 ? resolve() : reject(new TrefoilError(`a worker ended with code ${code}`)),
      );
      worker.on('message', (message: FromWorker) => {
        if (message.kind === 'ready') worker.postMessage(open.shift() ?? null);
        else if (message.kind === 'failed') reject(failureOf(message));
        else if (message.kind === 'unit') {
          sums.documents += message.documents;
          sums.tokens += message.tokens;
          sums.bytes += message.bytes;
          if (message.done) sums.parts++;
          onProgress?.({ ...sums, totalParts: total });
        }
      });
    });
  try {
    await Promise.all(Array.from({ length: Math.min(options.workers, Math.max(1, open.length)) }, run));
  } finally {
    await Promise.all(workers.map((worker) => worker.terminate()));
  }
}

/** One index over all parts. Token files are linked, not copied; only the small lists of documents are written anew. */
function joinUnits(working: string, total: number, tokenizerName: string): ShardIndex {
  const target = join(working, 'final');
  rmSync(target, { recursive: true, force: true });
  ensureFolder(target);
  const tokenizer = createTokenizer(tokenizerName);
  const shards: ShardIndex['shards'] = [];
  const sums = { tokens: 0, documents: 0, skippedFiles: 0 };
  let dtype: ShardIndex['dtype'] = 'u8';
  for (let unit = 0; unit < total; unit++) {
    const folder = unitFolder(working, unit);
    // Sizes and the index are checked here, hashes when the shards are opened.
    const reader = ShardReader.open(folder, { verify: false });
    const { index, documentStarts } = reader;
    reader.close();
    sums.skippedFiles += index.skippedFiles;
    dtype = index.dtype;
    if (index.tokens === 0) continue;
    const number = String(shards.length).padStart(5, '0');
    const [part] = index.shards;
    linkSync(join(folder, part.tokens.file), join(target, `tokens-${number}.bin`));
    const starts = documentStarts.map((start) => start + sums.tokens);
    shards.push({
      tokens: { ...part.tokens, file: `tokens-${number}.bin` },
      documents: writeHashed(target, `docs-${number}.bin`, new Uint8Array(starts.buffer)),
    });
    sums.tokens += index.tokens;
    sums.documents += index.documents;
  }
  if (shards.length === 0) throw new UsageError('data.path: no text in the corpus; name files with text');
  const { name, identity, vocabSize, separator } = tokenizer;
  const { index, text } = encodeIndex({ tokenizer: { name, identity }, vocabSize, dtype, separator, ...sums, shards });
  writeHashed(target, INDEX_NAME, Buffer.from(text));
  return index;
}

function writeHashed(folder: string, file: string, bytes: Uint8Array): ShardFile {
  const descriptor = openSync(join(folder, file), 'wx');
  try {
    for (let done = 0; done < bytes.length; ) done += writeSync(descriptor, bytes, done);
    fsyncSync(descriptor);
  } finally {
    closeSync(descriptor);
  }
  return { file, bytes: bytes.length, sha256: createHash('sha256').update(bytes).digest('hex') };
}
