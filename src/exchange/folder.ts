/** Folders that appear whole or not at all, and the small files that travel with a model. */
import { mkdirSync, renameSync, rmSync } from 'node:fs';
import { basename, dirname, join, resolve } from 'node:path';
import { isBuiltInTokenizer } from '../data/tokenizers/built-in.js';
import { UsageError } from '../errors.js';
import {
  asideName,
  copyFile,
  ensureFolder,
  fileError,
  fsyncDir,
  leftBehind,
  namesFile,
  namesIn,
  statOrUndefined,
} from '../files.js';
import { modelFolder } from '../hub/cache.js';
import { readJson } from '../model/model-config.js';

/** Files of a tokenizer, and of how text is generated. */
const TOKENIZER = 'tokenizer.json';
const COMPANIONS = [
  TOKENIZER,
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'chat_template.jinja',
  'chat_template.json',
  'vocab.json',
  'merges.txt',
  'tokenizer.model',
  'generation_config.json',
];

/** The largest tokenizers have a quarter of a million tokens: some 30 MB. */
const TOKENIZER_BYTES = 64 << 20;

/** Fills a folder under another name and renames it when `fill` is done; after an error nothing is left. */
export function writeFolder<T>(out: string, fill: (folder: string) => T): T {
  if (namesFile(out)) throw new UsageError(`${out}: the result is a folder; give a name without an extension`);
  const path = resolve(out);
  if (statOrUndefined(path) && (!statOrUndefined(path)?.isDirectory() || namesIn(path).length > 0))
    throw new UsageError(`${out}: exists already; choose a new folder`);
  const [parent, aside] = [dirname(path), asideName(path)];
  try {
    ensureFolder(parent);
    const pattern = new RegExp(`^\\.${basename(path).replace(/[^\w]/g, '\\$&')}\\.tmp-(\\d+)$`);
    for (const left of leftBehind(parent, pattern)) rmSync(left, { recursive: true, force: true });
    mkdirSync(aside);
    const result = fill(aside);
    fsyncDir(aside);
    renameSync(aside, path);
    fsyncDir(parent);
    return result;
  } catch (error) {
    rmSync(aside, { recursive: true, force: true });
    throw fileError('write', out, error);
  }
}

/** Copies what belongs to the tokenizer; returns the names. */
export function copyCompanions(from: string, to: string): string[] {
  const present = COMPANIONS.filter((name) => statOrUndefined(join(from, name))?.isFile());
  for (const name of present) copyFile(join(from, name), join(to, name), { links: 'in model' });
  return present;
}

/** Copies the files of a tokenizer, named by its folder or by its file, under their usual names; returns these. */
export function copyTokenizer(name: string, to: string): string[] {
  if (isBuiltInTokenizer(name)) return [];
  const tokenizer = modelFolder(name);
  if (statOrUndefined(tokenizer)?.isDirectory()) return copyCompanions(tokenizer, to);
  const copied = copyCompanions(dirname(tokenizer), to);
  // A tokenizer may have any name, and lie beside one with the usual name.
  if (basename(tokenizer) === TOKENIZER || !statOrUndefined(tokenizer)) return copied;
  copyFile(tokenizer, join(to, TOKENIZER), { links: 'in model' });
  return [TOKENIZER, ...copied.filter((name) => name !== TOKENIZER)];
}

/** Refuses a tokenizer.json with ids beyond the rows of the embedding. A missing one is accepted. */
export function expectTokenizerFits(folder: string, vocabulary: number): void {
  const path = join(folder, TOKENIZER);
  if (!statOrUndefined(path)) return;
  const json = readJson(path, TOKENIZER_BYTES) as {
    model?: { vocab?: Record<string, unknown> | unknown[] };
    added_tokens?: { id?: unknown }[];
  } | null;
  const vocab = json?.model?.vocab;
  if (typeof vocab !== 'object' || vocab === null)
    throw new UsageError(`${path}: has no model.vocab; download the tokenizer again`);
  const ids = Array.isArray(vocab) ? [vocab.length - 1] : Object.values(vocab);
  let [largest, token] = [-1, ''];
  const offer = (id: unknown, name: string) => {
    if (typeof id === 'number' && id > largest) [largest, token] = [id, name];
  };
  const names = Array.isArray(vocab) ? [] : Object.keys(vocab);
  ids.forEach((id, i) => void offer(id, names[i] ?? ''));
  for (const added of json?.added_tokens ?? []) offer(added.id, (added as { content?: string }).content ?? '');
  if (largest >= vocabulary)
    throw new UsageError(
      `${path}: token ${JSON.stringify(token)} has the id ${largest}, but the model has ${vocabulary} tokens (vocab_size); ` +
        'the tokenizer belongs to another model',
    );
}
