/** The work of one machine: the shards of a part of a corpus, described by part.json in a folder of its own. */

import { createHash } from 'node:crypto';
import { closeSync, existsSync, fsyncSync, openSync } from 'node:fs';
import { join } from 'node:path';
import { writeFully } from '../../files.js';
import * as z from '../../zod.js';
import { Count, DamagedShards, INDEX_NAME, readJsonFile, SHARD_CONTENT, ShardEntries } from './format.js';
import type { PartNumber } from './groups.js';

const MANIFEST = 'part.json';
const REMEDY = 'remove its folder and prepare the part again';

const Content = z.strictObject({
  format: z.literal('trefoil-part'),
  version: z.literal(1),
  part: Count,
  parts: Count,
  /** Equal for all parts of one corpus (groups.ts). */
  plan: z.string(),
  ...SHARD_CONTENT,
  /** Their `base` counts from the first token of the part. */
  shards: ShardEntries,
});
export type PartManifest = z.infer<typeof Content>;

/** The folder of a part, with its number as wide as that of the last: parts are listed in order. */
export function partFolder(folder: string, { index, count }: PartNumber): string {
  return join(folder, `part-${String(index).padStart(String(count).length, '0')}-of-${count}`);
}

/** Whether a folder has the index of all shards. */
export function isJoined(folder: string): boolean {
  return existsSync(join(folder, INDEX_NAME));
}

export function writePartManifest(folder: string, manifest: Omit<PartManifest, 'format' | 'version'>): void {
  const content = Content.parse({ format: 'trefoil-part', version: 1, ...manifest });
  const descriptor = openSync(join(folder, MANIFEST), 'wx');
  try {
    writeFully(descriptor, Buffer.from(`${JSON.stringify({ ...content, checksum: checksumOf(content) }, null, 1)}\n`));
    fsyncSync(descriptor);
  } finally {
    closeSync(descriptor);
  }
}

/** Reads and checks a manifest. `data join` checks the files that it lists. */
export function readPartManifest(folder: string): PartManifest {
  const path = join(folder, MANIFEST);
  const value = readJsonFile(path, (reason, cause) => {
    throw new DamagedShards(`${reason}; ${REMEDY}`, { cause });
  });
  const { checksum, ...rest } = (value ?? {}) as Record<string, unknown>;
  const content = Content.safeParse(rest);
  if (!content.success)
    throw damaged(path, `${content.error.issues[0].path.join('.')}: ${content.error.issues[0].message}`);
  if (checksum !== checksumOf(content.data)) throw damaged(path, 'its checksum does not match');
  return content.data;
}

function damaged(path: string, reason: string): DamagedShards {
  return new DamagedShards(`${path}: damaged (${reason}); ${REMEDY}`);
}

function checksumOf(content: PartManifest): string {
  return createHash('sha256').update(JSON.stringify(content)).digest('hex');
}
