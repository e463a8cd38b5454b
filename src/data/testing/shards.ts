/** Small shards for tests, written from lists of ids. */

import { mkdirSync } from 'node:fs';
import { ShardReader } from '../shards/reader.js';
import { ShardWriter } from '../shards/writer.js';
import type { Tokenizer } from '../tokenizer.js';
import { createByteTokenizer } from '../tokenizers/bytes.js';

/** A tokenizer of any vocabulary size, for what only looks at its numbers. */
export function numberTokenizer(vocabSize: number): Tokenizer {
  return { ...createByteTokenizer(), name: `numbers-${vocabSize}`, identity: `numbers-${vocabSize}`, vocabSize };
}

export function writeShards(
  folder: string,
  documents: readonly ArrayLike<number>[],
  tokenizer: Tokenizer = createByteTokenizer(),
  tokensPerShard?: number,
): void {
  mkdirSync(folder, { recursive: true });
  const writer = new ShardWriter(folder, tokenizer, tokensPerShard);
  for (const ids of documents) {
    writer.append(ids);
    writer.endDocument();
  }
  writer.finish();
}

export function openShards(
  folder: string,
  documents: readonly ArrayLike<number>[],
  tokenizer?: Tokenizer,
): ShardReader {
  writeShards(folder, documents, tokenizer);
  return ShardReader.open(folder);
}

/** The expected content of the shards: each document, then the separator. */
export function streamOf(documents: readonly ArrayLike<number>[], separator = 0): number[] {
  return documents.flatMap((ids) => (ids.length === 0 ? [] : [...Array.from(ids), separator]));
}
