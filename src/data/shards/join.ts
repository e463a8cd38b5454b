/**
 * `data join`: the parts that several machines prepared, as the shards that one machine would have made. Files are checked
 * against their hashes and renamed, never copied; the index comes last. An interrupted join goes on where it was.
 */

import { closeSync, existsSync, renameSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { UsageError } from '../../errors.js';
import { fsyncDir, namesIn, writeFileAtomic } from '../../files.js';
import { encodeIndex, INDEX_NAME, readIndex, type ShardEntry, type ShardFile, type ShardIndex } from './format.js';
import { isJoined, type PartManifest, partFolder, readPartManifest } from './part-manifest.js';
import { openChecked, verifyHash } from './reader.js';

/** Missing parts that a message names. */
const NAMED_PARTS = 8;

/** A file of a part, and where it belongs. */
interface Move {
  readonly from: string;
  readonly to: string;
  readonly expected: ShardFile;
}

export interface JoinProgress {
  readonly files: number;
  readonly totalFiles: number;
}

export function joinParts(folder: string, onProgress: (progress: JoinProgress) => void = () => {}): ShardIndex {
  if (isJoined(folder)) return finishRemoval(folder);
  const { moves, index, text } = plannedShards(folder, readParts(folder));
  for (const [files, { from, to, expected }] of moves.entries()) {
    // A file that an interrupted join has moved already is checked in its new place.
    const path = existsSync(from) ? from : to;
    const descriptor = openChecked(path, expected);
    try {
      verifyHash(path, descriptor, expected);
    } finally {
      closeSync(descriptor);
    }
    onProgress({ files: files + 1, totalFiles: moves.length });
  }
  for (const { from, to } of moves) if (existsSync(from)) renameSync(from, to);
  fsyncDir(folder);
  writeFileAtomic(join(folder, INDEX_NAME), text);
  for (const path of partFolders(folder)) rmSync(path, { recursive: true, force: true });
  return index;
}

function partFolders(folder: string): string[] {
  return namesIn(folder).flatMap((name) => (/^part-\d+-of-\d+$/.test(name) ? [join(folder, name)] : []));
}

/** A join that was interrupted while it removed the folders of the parts, which are empty but for their manifests. */
function finishRemoval(folder: string): ShardIndex {
  const left = partFolders(folder);
  if (left.length === 0) throw new UsageError(`${folder} is joined already; train from it with --local-path`);
  const full = left.find((path) => namesIn(path).some((name) => name.endsWith('.bin')));
  if (full !== undefined)
    throw new UsageError(`${folder} holds joined shards beside ${full}; remove one of the two, or name another folder`);
  for (const path of left) rmSync(path, { recursive: true, force: true });
  return readIndex(folder);
}

/** All parts in order. Throws unless every part is there, finished, and of the same corpus. */
function readParts(folder: string): PartManifest[] {
  const folders = partFolders(folder);
  if (folders.length === 0)
    throw new UsageError(`${folder} holds no parts; make them with trefoil data prepare --part 1/N --out ${folder}`);
  const parts = folders.map(readPartManifest).sort((a, b) => a.part - b.part);
  const [first] = parts;
  const count = first.parts;
  for (const part of parts)
    if (part.parts !== count || part.plan !== first.plan)
      throw new UsageError(
        `${folder}: part ${part.part} of ${part.parts} is of another corpus, tokenizer or division than part ${first.part} of ` +
          `${count}; prepare all parts with the same flags`,
      );
  const present = new Set(parts.map(({ part }) => part));
  const missing: number[] = [];
  // A manifest may claim any number of parts: no more are looked for than are named below.
  for (let i = 1; i <= count && missing.length <= NAMED_PARTS; i++) if (!present.has(i)) missing.push(i);
  if (missing.length > 0)
    throw new UsageError(
      `${folder}: part ${missing.slice(0, NAMED_PARTS).join(', ')}${missing.length > NAMED_PARTS ? ' and others' : ''} of ` +
        `${count} ${missing.length === 1 ? 'is' : 'are'} missing; run trefoil data prepare --part ${missing[0]}/${count} again`,
    );
  if (parts.length !== count)
    throw new UsageError(
      `${folder}: ${parts.length} folders say that they are the ${count} parts; remove those that are there twice`,
    );
  return parts;
}

/** The index of all shards, and the files that have to move for it. */
function plannedShards(folder: string, parts: readonly PartManifest[]) {
  const moves: Move[] = [];
  const shards: ShardEntry[] = [];
  const sums = { tokens: 0, documents: 0, skippedFiles: 0 };
  for (const manifest of parts) {
    const place = partFolder(folder, { index: manifest.part, count: manifest.parts });
    for (const { tokens, documents, base = 0 } of manifest.shards) {
      const number = String(shards.length).padStart(5, '0');
      const moved = (file: ShardFile, kind: string): ShardFile => {
        const expected = { ...file, file: `${kind}-${number}.bin` };
        moves.push({ from: join(place, file.file), to: join(folder, expected.file), expected });
        return expected;
      };
      const from = sums.tokens + base;
      shards.push({
        tokens: moved(tokens, 'tokens'),
        documents: moved(documents, 'docs'),
        ...(from > 0 && { base: from }),
      });
    }
    sums.tokens += manifest.tokens;
    sums.documents += manifest.documents;
    sums.skippedFiles += manifest.skippedFiles;
  }
  if (shards.length === 0) throw new UsageError(`${folder}: no part has text; name files with text`);
  const [{ tokenizer, vocabSize, dtype, separator }] = parts;
  return { moves, ...encodeIndex({ tokenizer, vocabSize, dtype, separator, ...sums, shards }) };
}
