/** The files of a repository that a model needs. */
import { basename } from 'node:path';
import { UsageError } from '../errors.js';
import { parseObject, readText } from '../files.js';
import { isPlainObject } from '../json-values.js';
import type { TreeEntry } from './listing.js';

export const MODEL_FILES = {
  config: 'config.json',
  weights: 'model.safetensors',
  index: 'model.safetensors.index.json',
} as const;

/** Everything else that is read: the tokenizer, its chat template, and when a text ends. */
const OTHER_FILES: readonly string[] = [
  'generation_config.json',
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'chat_template.jinja',
  'chat_template.json',
];

/** An index lists every tensor: a few hundred bytes each. */
const INDEX_BYTES = 16 << 20;
/** Limit of every file but the weights: the largest tokenizers have 30 MB. */
const SMALL_FILE_BYTES = 64 << 20;
const MAX_SHARDS = 1000;

/** A file to download. */
export interface HubFile {
  readonly name: string;
  readonly size: number;
  /** Its name among the blobs: the SHA-256 of the content, or the SHA-1 that git gives it. */
  readonly blob: string;
}

/** The small files of a model: config, index of the shards, tokenizer. */
export function smallFiles(tree: readonly TreeEntry[], repository: string): HubFile[] {
  const names: readonly string[] = [MODEL_FILES.config, MODEL_FILES.index, ...OTHER_FILES];
  const files = tree.filter(({ type, path }) => type === 'file' && names.includes(path));
  if (!files.some(({ path }) => path === MODEL_FILES.config))
    throw new UsageError(`hf:${repository} has no config.json; name a model that transformers loads`);
  return files.map((entry) => {
    const file = hubFile(entry, repository);
    if (file.size <= SMALL_FILE_BYTES) return file;
    throw new UsageError(
      `hf:${repository}: ${file.name} has ${file.size} bytes, more than the ${SMALL_FILE_BYTES} that are read; name another model`,
    );
  });
}

/** The weights: the shards that the index names, or one file. */
export function weightFiles(
  tree: readonly TreeEntry[],
  shards: readonly string[] | null,
  repository: string,
): HubFile[] {
  const listed = new Map(tree.filter(({ type }) => type === 'file').map((entry) => [entry.path, entry]));
  return (shards ?? [MODEL_FILES.weights]).map((name) => {
    const entry = listed.get(name);
    if (entry) return hubFile(entry, repository);
    if (shards) throw new UsageError(`hf:${repository} has no ${name}, which its ${MODEL_FILES.index} names`);
    const others = tree
      .filter(({ path }) => /\.(bin|gguf|pth|pt|onnx|safetensors)$/.test(path))
      .map(({ path }) => path);
    const has = others.length > 0 ? `only ${others.slice(0, 3).join(', ')}` : 'no weights';
    throw new UsageError(`hf:${repository} has no ${MODEL_FILES.weights}, ${has}; choose a model in that format`);
  });
}

/** Names of the files in an index; null where there is no index. */
export function shardsOf(index: string): string[] | null {
  const text = readText(index, { limit: INDEX_BYTES, links: 'in model' });
  if (text === undefined) return null;
  const map = parseObject(text)?.['weight_map'];
  const names = isPlainObject(map) ? [...new Set(Object.values(map))] : [];
  const isShard = (name: unknown): name is string =>
    typeof name === 'string' && basename(name) === name && /^[\w.-]+\.safetensors$/.test(name) && !name.startsWith('.');
  if (names.length > MAX_SHARDS)
    throw new UsageError(
      `${index}: names ${names.length} files, more than the ${MAX_SHARDS} of any model; use another revision`,
    );
  if (names.length > 0 && names.every(isShard)) return names.sort();
  throw new UsageError(`${index}: has no weight_map from tensors to .safetensors files; use another revision`);
}

function hubFile({ path, size, oid, lfs }: TreeEntry, repository: string): HubFile {
  const [blob, bytes] = lfs ? [lfs.oid, lfs.size] : [oid, size];
  const isHash = lfs ? /^[0-9a-f]{64}$/ : /^[0-9a-f]{40}$/;
  if (blob === undefined || bytes === undefined || !isHash.test(blob))
    throw new UsageError(`hf:${repository}: the hub lists ${path} without its size and hash; is HF_ENDPOINT a hub?`);
  return { name: path, size: bytes, blob };
}
