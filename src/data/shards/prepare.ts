/**
 * `data prepare`: a corpus to token shards, resumable. Every part becomes a file in a folder beside the target, and
 * finished parts are not tokenised again. They are joined as they are finished, and the result gets its name by a rename.
 * The shards depend on neither the number of threads, nor the size of the parts, nor interruptions.
 */

import { existsSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { UsageError } from '../../errors.js';
import { ensureFolder } from '../../files.js';
import { pidExists } from '../../process-identity.js';
import type { FileReport } from '../sources/files.js';
import { CorpusOrder, corpusIdentity } from '../sources/order.js';
import { createTokenizer } from '../tokenizer.js';
import { type BuildOptions, finish, finishedUnits, JoinedUnits, ProgressCounter, tokeniseInThreads } from './build.js';
import { removeFolder, renameDurably } from './folders.js';
import type { ShardIndex } from './format.js';
import { ShardWriter } from './writer.js';

export interface PrepareOptions extends Omit<BuildOptions, 'tokenizer'> {
  readonly folder: string;
  readonly onNote?: (line: string) => void;
}

export async function prepareCorpus(options: PrepareOptions): Promise<{ index: ShardIndex; report: FileReport }> {
  const { spec, folder, tokenizerName } = options;
  if (existsSync(folder) && readdirSync(folder).length > 0)
    throw new UsageError(`${folder} is not empty; name a new folder for the shards, or remove it`);
  const tokenizer = createTokenizer(tokenizerName);
  const working = `${folder}.preparing`;
  ensureFolder(working);
  const release = takeOver(working);
  try {
    checkPlan(working, corpusIdentity(spec, tokenizer.identity));
    const { unitsPerEpoch: total } = new CorpusOrder(spec);
    const done = finishedUnits(working, total);
    if (done.size > 0) options.onNote?.(`${done.size} of ${total} parts are done already`);
    const counter = new ProgressCounter(total, done.size, options.onProgress);
    const target = join(working, 'final');
    rmSync(target, { recursive: true, force: true });
    ensureFolder(target);
    const writer = new ShardWriter(target, tokenizer);
    try {
      const joined = new JoinedUnits(working, writer, done);
      await tokeniseInThreads(options, working, total, joined, counter);
      const index = await finish(writer, spec, joined.skippedFiles);
      renameDurably(target, folder);
      release();
      await removeFolder(working);
      return { index, report: counter.report };
    } catch (error) {
      writer.abandon();
      throw error;
    }
  } finally {
    release();
  }
}

/** Refuses a folder that a living process works in; that of a dead one is taken over. */
function takeOver(working: string): () => void {
  const path = join(working, 'owner');
  const owner = existsSync(path) ? Number(readFileSync(path, 'utf8')) : 0;
  if (owner > 0 && owner !== process.pid && pidExists(owner))
    throw new UsageError(`${working} is in use by process ${owner}; wait for it or choose another --out`);
  writeFileSync(path, `${process.pid}\n`);
  return () => rmSync(path, { force: true });
}

/** Refuses to mix parts of different corpora or tokenizers. */
function checkPlan(working: string, plan: string): void {
  const path = join(working, 'plan');
  if (!existsSync(path)) writeFileSync(path, plan);
  else if (readFileSync(path, 'utf8') !== plan)
    throw new UsageError(`${working} holds parts of another corpus or tokenizer; remove it or choose another --out`);
}
