/**
 * Writes part of a corpus as local JSON Lines. Every file appears complete. A list beside them holds the position in the
 * corpus, so that an interrupted command, or one with a larger size, continues with the next document.
 */

import { closeSync, fsyncSync, openSync, renameSync } from 'node:fs';
import { join } from 'node:path';
import { UsageError } from '../errors.js';
import { ensureFolder, readText, writeFileAtomic, writeFully } from '../files.js';
import * as z from '../zod.js';
import { firstEpoch, LaneDocuments, START } from './sources/documents.js';
import { CorpusOrder, corpusIdentity } from './sources/order.js';
import { documentText } from './sources/reader.js';
import type { CorpusSpec } from './sources/spec.js';

/** Not a name that is read as JSON Lines. */
const LIST = 'bootstrap.json';
const FILE_BYTES = 64e6;
const BUFFERED_BYTES = 1 << 20;

const Count = z.number().int().min(0);
const Progress = z.strictObject({
  identity: z.string(),
  documents: Count,
  bytes: Count,
  files: Count,
  exhausted: z.boolean(),
  lanes: z.array(z.strictObject({ turn: Count, block: Count, document: Count, token: Count })),
});
type Progress = z.infer<typeof Progress>;

export interface BootstrapOptions {
  readonly spec: CorpusSpec;
  readonly folder: string;
  /** Stops with the document that brings the files to this size. */
  readonly bytes: number;
  readonly fileBytes?: number;
  readonly onProgress?: (progress: Pick<Progress, 'documents' | 'bytes' | 'files'>) => void;
}

export type BootstrapResult = Pick<Progress, 'documents' | 'bytes' | 'files' | 'exhausted'>;

export async function bootstrap(options: BootstrapOptions): Promise<BootstrapResult> {
  const { spec, folder, bytes: wanted, onProgress } = options;
  const identity = corpusIdentity({ ...spec, lanes: spec.lanes }, `seed ${spec.seed} ${spec.shuffle}`);
  ensureFolder(folder);
  const progress = readProgress(folder, identity) ?? {
    identity,
    documents: 0,
    bytes: 0,
    files: 0,
    exhausted: false,
    lanes: Array.from({ length: spec.lanes }, () => START),
  };
  const order = new CorpusOrder(spec);
  const lanes = progress.lanes.map((cursor, lane) => new LaneDocuments(order, lane, { side: 'all', cursor }));
  try {
    while (progress.bytes < wanted && !progress.exhausted) {
      await writeOneFile(lanes, progress, options, Math.min(wanted - progress.bytes, options.fileBytes ?? FILE_BYTES));
      onProgress?.(progress);
    }
  } finally {
    await Promise.all(lanes.map((lane) => lane.close()));
  }
  const { documents, bytes, files, exhausted } = progress;
  return { documents, bytes, files, exhausted };
}

/** Writes the next file and advances `progress`. */
async function writeOneFile(
  lanes: readonly LaneDocuments[],
  progress: Progress,
  { spec, folder, onProgress }: BootstrapOptions,
  bytes: number,
): Promise<void> {
  const path = join(folder, `part-${String(progress.files).padStart(5, '0')}.jsonl`);
  const aside = `${path}.partial`;
  const descriptor = openSync(aside, 'w');
  const cursors = [...progress.lanes];
  let isExhausted = true;
  const counted = { documents: 0, bytes: 0 };
  let pending: string[] = [];
  let pendingBytes = 0;
  const flush = (): void => {
    writeFully(descriptor, Buffer.from(pending.join('')));
    pending = [];
    pendingBytes = 0;
  };
  try {
    for await (const { lane, placed } of firstEpoch(lanes, progress.documents)) {
      cursors[lane] = { turn: placed.turn, block: placed.block, document: placed.index + 1, token: 0 };
      const text = documentText(placed.document);
      if (text === '') continue;
      const line = `${JSON.stringify({ text })}\n`;
      const size = Buffer.byteLength(line);
      pending.push(line);
      pendingBytes += size;
      counted.documents++;
      counted.bytes += size;
      if (pendingBytes >= BUFFERED_BYTES) {
        flush();
        onProgress?.({
          documents: progress.documents + counted.documents,
          bytes: progress.bytes + counted.bytes,
          files: progress.files + 1,
        });
      }
      isExhausted = counted.bytes < bytes;
      if (!isExhausted) break;
    }
    flush();
    fsyncSync(descriptor);
  } finally {
    closeSync(descriptor);
  }
  if (counted.documents > 0) {
    renameSync(aside, path);
    progress.files++;
  }
  progress.documents += counted.documents;
  progress.bytes += counted.bytes;
  progress.exhausted = isExhausted;
  progress.lanes = cursors;
  if (progress.documents === 0) throw new UsageError(`no text in ${spec.files[0].name}; check data.text_field`);
  writeFileAtomic(join(folder, LIST), JSON.stringify(progress));
}

function readProgress(folder: string, identity: string): Progress | undefined {
  const path = join(folder, LIST);
  const text = readText(path);
  if (text === undefined) return undefined;
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new UsageError(`${path}: damaged; remove the folder and start again`, { cause: error });
  }
  const parsed = Progress.safeParse(value);
  if (!parsed.success) throw new UsageError(`${path}: not a list of staged files; choose another --out`);
  if (parsed.data.identity !== identity)
    throw new UsageError(`${folder} holds a piece of another corpus or order; choose another --out`);
  return parsed.data;
}
