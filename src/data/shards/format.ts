/**
 * Prepared tokens on disk: a folder that is read by position.
 *
 *   index.json          lists the other files with sizes and hashes; protected by its own `checksum`
 *   tokens-00000.bin    token ids, little-endian, 1, 2 or 4 bytes each; documents in order, each with its separator
 *   docs-00000.bin      positions of the documents that begin in this shard: little-endian float64 (exact to 2^53),
 *                       in tokens from the start of the first shard, or from token `base` of the stream if it has one
 *
 * Shards divide one long stream at any place, so a document may span two of them. Nothing in the index depends on paths or
 * dates: equal text and tokenizer give an equal checksum, which identifies the data of a resumed run.
 */

import { createHash } from 'node:crypto';
import { join } from 'node:path';
import { UsageError } from '../../errors.js';
import { readRegularFile } from '../../files.js';
import * as z from '../../zod.js';

export const INDEX_NAME = 'index.json';
const FORMAT = 'trefoil-tokens';
const VERSION = 1;
/** A shard takes some 500 bytes of it. */
const INDEX_BYTES = 64 << 20;

/** Shards that fail a check. A cache entry is then built again; prepared shards are refused. */
export class DamagedShards extends UsageError {}

export const Count = z.number().int().min(0).max(Number.MAX_SAFE_INTEGER);
// Only plain names: an untrusted index must not refer to files outside its folder.
const ShardFile = z.strictObject({
  file: z.string().regex(/^(tokens|docs)-\d{5,8}\.bin$/),
  bytes: Count,
  sha256: z.string().regex(/^[0-9a-f]{64}$/),
});
/** Shards with a `base` were written without knowing what comes before them (groups.ts). */
export const ShardEntry = z.strictObject({ tokens: ShardFile, documents: ShardFile, base: Count.optional() });
export type ShardEntry = z.infer<typeof ShardEntry>;
/** Each file once: a small file that is listed a thousand times would be read a thousand times, into memory as well. */
export const ShardEntries = z
  .array(ShardEntry)
  .refine(
    (shards) =>
      new Set(shards.flatMap(({ tokens, documents }) => [tokens.file, documents.file])).size === 2 * shards.length,
    'a file is listed twice',
  );

/** Fields that the index of all shards and the manifest of a part share. */
export const SHARD_CONTENT = {
  tokenizer: z.strictObject({ name: z.string(), identity: z.string() }),
  vocabSize: Count,
  dtype: z.enum(['u8', 'u16', 'u32']),
  separator: Count,
  tokens: Count,
  documents: Count,
  /** Number of binary source files that were skipped. */
  skippedFiles: Count,
};

const ShardIndexContent = z.strictObject({
  format: z.literal(FORMAT),
  version: z.literal(VERSION),
  ...SHARD_CONTENT,
  shards: ShardEntries.min(1),
});
export type ShardIndexContent = z.infer<typeof ShardIndexContent>;
export type ShardFile = z.infer<typeof ShardFile>;
export type ShardIndex = ShardIndexContent & { checksum: string };

export function encodeIndex(content: Omit<ShardIndexContent, 'format' | 'version'>): {
  index: ShardIndex;
  text: string;
} {
  // Parsed, so that the checksum always covers the keys in the order of the schema.
  const full = ShardIndexContent.parse({ format: FORMAT, version: VERSION, ...content });
  const index = { ...full, checksum: checksumOf(full) };
  return { index, text: `${JSON.stringify(index, null, 1)}\n` };
}

/** A JSON file that describes shards, of a regular file and bounded: the folder may be a stranger's. */
export function readJsonFile(path: string, refuse: (reason: string, cause: unknown) => never): unknown {
  let text: string;
  try {
    text = readRegularFile(path, { limit: INDEX_BYTES }).toString('utf8');
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    return refuse(error.message, error);
  }
  try {
    return JSON.parse(text);
  } catch (error) {
    return refuse(`${path}: damaged (not valid JSON)`, error);
  }
}

/** Reads and checks the index of a folder of shards. The reader checks the files that it lists. */
export function readIndex(folder: string): ShardIndex {
  const path = join(folder, INDEX_NAME);
  const value = readJsonFile(path, (reason, cause) => {
    throw new DamagedShards(`${reason}; prepare the shards again`, { cause });
  });
  const header = z
    .looseObject({ format: z.literal(FORMAT), version: z.number(), checksum: z.string() })
    .safeParse(value);
  if (!header.success) throw new DamagedShards(`${path}: not an index of prepared tokens`);
  if (header.data.version !== VERSION) {
    const found = header.data.version;
    throw new DamagedShards(
      `${path}: format version ${found}, but this program reads ${VERSION}; prepare the shards again`,
    );
  }
  const { checksum, ...rest } = header.data;
  const content = ShardIndexContent.safeParse(rest);
  if (!content.success) {
    const issue = content.error.issues[0];
    throw new DamagedShards(`${path}: ${issue.path.join('.')}: ${issue.message}; prepare the shards again`);
  }
  if (checksumOf(content.data) !== checksum) {
    throw new DamagedShards(`${path}: damaged (its checksum does not match); prepare the shards again`);
  }
  return { ...content.data, checksum };
}

function checksumOf(content: ShardIndexContent): string {
  return createHash('sha256').update(JSON.stringify(content)).digest('hex');
}
