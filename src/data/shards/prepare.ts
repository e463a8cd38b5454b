/**
 * `data prepare`: a corpus to token shards, resumable. Every unit of the corpus becomes a file in a folder beside the target,
 * and finished units are not tokenised again. They are joined as they are finished, and the result gets its name by a rename.
 * The shards depend on neither the number of threads, nor the size of the units, nor interruptions, nor on how many machines
 * prepared a part each (`data join`).
 */

import { existsSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { UsageError } from '../../errors.js';
import { ensureFolder, parseObject } from '../../files.js';
import { isAlive, ownIdentity, type ProcessIdentity } from '../../process-identity.js';
import type { FileReport } from '../sources/files.js';
import { corpusIdentity } from '../sources/order.js';
import { createTokenizer } from '../tokenizer.js';
import {
  type BuildOptions,
  expectUnchanged,
  finish,
  finishedUnits,
  JoinedUnits,
  ProgressCounter,
  tokeniseInThreads,
} from './build.js';
import { removeFolder, renameDurably } from './folders.js';
import type { ShardIndexContent } from './format.js';
import { GROUP_BYTES, groupBorders, groupsOfPart, type PartNumber, planOf } from './groups.js';
import { isJoined, partFolder, readPartManifest, writePartManifest } from './part-manifest.js';
import { ShardWriter } from './writer.js';

export interface PrepareOptions extends Omit<BuildOptions, 'tokenizer'> {
  readonly folder: string;
  /** The value with which the corpus was opened. Default: that of `data prepare`. */
  readonly groupBytes?: number | undefined;
  /** Only this part of the corpus, into a folder of its own inside `folder`. Default: everything. */
  readonly part?: PartNumber | undefined;
  readonly onNote?: (line: string) => void;
}

/** The result: all shards, or those of a part. */
export interface Prepared {
  readonly index: Pick<ShardIndexContent, 'documents' | 'tokens' | 'shards' | 'skippedFiles'> & {
    /** Identifies the shards; null for a part. */
    readonly checksum: string | null;
  };
  readonly report: FileReport;
}

export async function prepareCorpus(options: PrepareOptions): Promise<Prepared> {
  const { spec, tokenizerName, part, groupBytes = GROUP_BYTES } = options;
  const folder = part === undefined ? options.folder : partFolder(options.folder, part);
  const tokenizer = createTokenizer(tokenizerName);
  const plan = planOf(spec, tokenizer.identity, groupBytes);
  if (part !== undefined) {
    if (isJoined(options.folder))
      throw new UsageError(`${options.folder} holds joined shards; name a new folder for the parts, or remove it`);
    ensureFolder(options.folder);
    const done = existsSync(folder) ? readPartManifest(folder) : undefined;
    if (done !== undefined) {
      if (done.plan !== plan) throw otherCorpus(folder);
      options.onNote?.(`part ${part.index} of ${part.count} is done already`);
      return { index: { ...done, checksum: null }, report: { skipped: [], replaced: [] } };
    }
  } else if (existsSync(folder) && readdirSync(folder).length > 0)
    throw new UsageError(`${folder} is not empty; name a new folder for the shards, or remove it`);
  const borders = groupBorders(spec, groupBytes);
  const groups = borders.length - 1;
  const [firstGroup, endGroup] = part === undefined ? [0, groups] : groupsOfPart(groups, part);
  const [first, end] = [borders[firstGroup], borders[endGroup]];
  const units = Array.from({ length: end - first }, (_, i) => first + i);
  const working = `${folder}.preparing`;
  ensureFolder(working);
  const release = takeOver(working);
  try {
    checkPlan(working, `${plan} ${corpusIdentity(spec, tokenizer.identity)}`);
    const earlier = finishedUnits(working, units);
    if (earlier.size > 0) options.onNote?.(`${earlier.size} of ${units.length} units are done already`);
    const counter = new ProgressCounter(units.length, earlier.size, options.onProgress);
    const target = join(working, 'final');
    rmSync(target, { recursive: true, force: true });
    ensureFolder(target);
    const writer = new ShardWriter(target, tokenizer);
    try {
      const joined = new JoinedUnits(working, writer, { earlier, first, groups: borders.slice(firstGroup, endGroup) });
      await tokeniseInThreads(options, working, units, joined, counter);
      const index =
        part === undefined
          ? await finish(writer, spec, joined.skippedFiles)
          : await finishPart(writer, options, part, plan, joined.skippedFiles, target);
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

/** A part may be empty: there may be more machines than groups, or only binary files in it. */
async function finishPart(
  writer: ShardWriter,
  { spec }: PrepareOptions,
  part: PartNumber,
  plan: string,
  skippedFiles: number,
  target: string,
): Promise<Prepared['index']> {
  await expectUnchanged(spec);
  const content = writer.end(skippedFiles);
  writePartManifest(target, { ...content, part: part.index, parts: part.count, plan });
  return { ...content, checksum: null };
}

/**
 * Refuses a folder that a living process of this machine works in. That of a dead one is taken over, and that of a process of
 * another machine: a scheduler starts a part again elsewhere only after its first process has ended.
 */
function takeOver(working: string): () => void {
  const path = join(working, 'owner');
  const owner = existsSync(path)
    ? (parseObject(readFileSync(path, 'utf8')) as unknown as ProcessIdentity | undefined)
    : undefined;
  if (owner !== undefined && owner.pid !== process.pid && isAlive(owner) === true)
    throw new UsageError(`${working} is in use by process ${owner.pid}; wait for it or choose another --out`);
  writeFileSync(path, `${JSON.stringify(ownIdentity())}\n`);
  return () => rmSync(path, { force: true });
}

/** Refuses to mix units of different corpora or tokenizers, or units of another size. */
function checkPlan(working: string, plan: string): void {
  const path = join(working, 'plan');
  if (!existsSync(path)) writeFileSync(path, plan);
  else if (readFileSync(path, 'utf8') !== plan) throw otherCorpus(working);
}

function otherCorpus(folder: string): UsageError {
  return new UsageError(
    `${folder} holds parts of another corpus, tokenizer or --shard-bytes; remove it or choose another --out`,
  );
}
