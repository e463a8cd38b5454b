/** config.json beside model.safetensors: all that is needed to build the model and to read its tokens. */
import { dirname, resolve } from 'node:path';
import type { Config } from '../config/schema.js';
import { isBuiltInTokenizer } from '../data/tokenizers/built-in.js';
import { UsageError } from '../errors.js';
import { readRegularFile, writeFileAtomic } from '../files.js';
import { isHubName } from '../hub/name.js';
import { isShallow } from '../json-values.js';
import { isModelHeading, modelConfigText, parseModelConfig, type SavedModel } from './saved-model.js';

/** An honest one has two thousand bytes; a wrong file under this name is not read into memory whole. */
const MAX_BYTES = 1 << 20;

export function writeModelConfig(path: string, saved: Omit<SavedModel, 'format' | 'version'>): void {
  writeFileAtomic(path, modelConfigText(saved));
}

/** The content with the config it stands for; everything but `model`, `nsa`, the tokenizer and `train.seq_len` has its default there. */
export function readModelConfig(path: string): { saved: SavedModel; config: Config } {
  return parseModelConfig(path, readJson(path), (tokenizer) => tokenizerSpec(path, tokenizer));
}

/** Whether Trefoil wrote this file, of whatever version. */
export function isModelConfig(path: string): boolean {
  try {
    return isModelHeading(readJson(path));
  } catch (error) {
    if (error instanceof UsageError) return false;
    throw error;
  }
}

function tokenizerSpec(path: string, tokenizer: string): string {
  return isBuiltInTokenizer(tokenizer) || isHubName(tokenizer) ? tokenizer : resolve(dirname(path), tokenizer);
}

/** A JSON file of a model, of at most `most` bytes. */
export function readJson(path: string, most = MAX_BYTES): unknown {
  const text = readRegularFile(path, { links: 'in model', limit: most });
  let json: unknown;
  try {
    json = JSON.parse(new TextDecoder().decode(text));
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    throw new UsageError(`${path}: is damaged: it is not JSON; use a checkpoint of the run`, { cause: error });
  }
  if (!isShallow(json)) throw new UsageError(`${path}: is nested too deeply; use the file as its program wrote it`);
  return json;
}
