/**
 * A folder with a Hugging Face model: config.json and the weights in one file or in shards. Everything is checked before
 * a weight is read: that each tensor exists once, has the shape that config.json implies, and that none is left over.
 */
import { basename, join } from 'node:path';
import { parseConfig } from '../config/parse.js';
import type { Config } from '../config/schema.js';
import { UsageError } from '../errors.js';
import { statOrUndefined } from '../files.js';
import { readJson } from '../model/model-config.js';
import { inFile, type ModelOrigin } from '../model/saved-model.js';
import { type ModelShape, modelShape } from '../model/shape.js';
import type { RowsInFile } from '../ops/linear/packed.js';
import { openSafetensors, type SafetensorsFile } from '../run/safetensors.js';
import { dtypeBytes, type SafeDtype, type SafeTensor } from '../run/safetensors-format.js';
import type { TensorSource } from '../run/tensor-source.js';
import * as z from '../zod.js';
import { isHfConfig, parseHfConfig } from './hf-config.js';
import { type HfParameter, hfParameters, isIgnored } from './hf-names.js';

export const HF_FILES = {
  config: 'config.json',
  generation: 'generation_config.json',
  weights: 'model.safetensors',
  index: 'model.safetensors.index.json',
  tokenizer: 'tokenizer.json',
} as const;

const FLOATS: readonly SafeDtype[] = ['F32', 'BF16', 'F16'];
/** An index lists every tensor: a few hundred bytes each. */
const INDEX_BYTES = 16 << 20;
/** The largest models come in some hundred files. */
const MAX_FILES = 1000;

const indexSchema = z.looseObject({ weight_map: z.record(z.string(), z.string()) });

/** The model that a folder describes, without its weights. */
export interface HfModel {
  readonly folder: string;
  readonly shape: ModelShape;
  /** `model`, `nsa` of a sparse model, and the tokenizer's path; the rest has defaults. */
  readonly config: Config;
  readonly endTokens: readonly number[];
  readonly origin: ModelOrigin;
}

/** Whether a folder holds the config.json of another program's model. */
export function isHfFolder(folder: string): boolean {
  const path = join(folder, HF_FILES.config);
  if (!statOrUndefined(path)) return false;
  try {
    return isHfConfig(readJson(path));
  } catch (error) {
    if (error instanceof UsageError) return false;
    throw error;
  }
}

export function readHfModel(folder: string): HfModel {
  const path = join(folder, HF_FILES.config);
  if (!statOrUndefined(path)) throw new UsageError(`${path}: is missing; name the folder of a Hugging Face model`);
  const generation = join(folder, HF_FILES.generation);
  const { model, nsa, vocabulary, endTokens, origin } = parseHfConfig(
    path,
    readJson(path),
    statOrUndefined(generation) ? readJson(generation) : null,
  );
  const tokenizer = join(folder, HF_FILES.tokenizer);
  const config = inFile(path, () => parseConfig({ model, nsa, data: { tokenizer } }));
  return { folder, shape: inFile(path, () => modelShape(config, vocabulary)), config, endTokens, origin };
}

/** The weights of a folder under the names of the model; the caller closes it. */
export class HfWeights implements TensorSource {
  readonly path: string;
  readonly entries: ReadonlyMap<string, { readonly dtype: SafeDtype; readonly shape: readonly number[] }>;
  readonly #parameters: ReadonlyMap<string, HfParameter>;
  readonly #files: readonly SafetensorsFile[];
  readonly #fileOf: ReadonlyMap<string, SafetensorsFile>;

  constructor({ folder, shape, origin }: HfModel) {
    this.path = folder;
    this.#parameters = new Map(
      hfParameters(shape, origin.architecture).map((parameter) => [parameter.name, parameter]),
    );
    const index = join(folder, HF_FILES.index);
    const listed = statOrUndefined(index) ? readIndex(index) : null;
    const names = listed ? [...new Set(listed.values())].sort() : [HF_FILES.weights];
    if (names.length > MAX_FILES)
      throw new UsageError(
        `${index}: names ${names.length} files, more than the ${MAX_FILES} of any model; download it again`,
      );
    const files: SafetensorsFile[] = [];
    try {
      for (const name of names) {
        const path = join(folder, name);
        if (!statOrUndefined(path)) throw new UsageError(`${path}: is missing${listed ? `; ${index} names it` : ''}`);
        files.push(openSafetensors(path, { links: 'in model' }));
      }
      this.#files = files;
      this.#fileOf = locate(files, listed, index);
      this.entries = this.#check(shape);
    } catch (error) {
      for (const file of files) file.close();
      throw error;
    }
  }

  read(name: string): SafeTensor {
    const { dtype, shape } = this.#entry(name);
    const data = new Uint8Array(bytesOf({ dtype, shape }));
    let at = 0;
    for (const piece of this.pieces(name, 0, data.length)) {
      data.set(piece, at);
      at += piece.length;
    }
    return { dtype, shape: [...shape], data };
  }

  parts(name: string): readonly RowsInFile[] {
    this.#entry(name);
    return (this.#parameters.get(name)?.parts ?? []).flatMap((part) => this.#file(part.name).parts(part.name));
  }

  *pieces(name: string, from: number, to: number): Generator<Uint8Array> {
    const { dtype } = this.#entry(name);
    const parts = this.#parameters.get(name)?.parts ?? [];
    if (parts.length === 0) yield new Uint8Array(to - from);
    let begin = 0;
    for (const part of parts) {
      const end = begin + bytesOf({ dtype, shape: part.shape });
      const [first, last] = [Math.max(from, begin), Math.min(to, end)];
      if (first < last) yield* this.#file(part.name).pieces(part.name, first - begin, last - begin);
      begin = end;
    }
  }

  close(): void {
    for (const file of this.#files) file.close();
  }

  #entry(name: string) {
    const entry = this.entries.get(name);
    if (!entry) throw new Error(`this model has no ${name}`);
    return entry;
  }

  #file(name: string): SafetensorsFile {
    const file = this.#fileOf.get(name);
    if (!file) throw new UsageError(`${this.path}: there is no tensor ${name}, which config.json implies`);
    return file;
  }

  /** Every tensor against what config.json implies. */
  #check(shape: ModelShape) {
    const entries = new Map<string, { dtype: SafeDtype; shape: readonly number[] }>();
    const known = new Set<string>();
    for (const parameter of this.#parameters.values()) {
      const dtypes = parameter.parts.map((part) => {
        known.add(part.name);
        const file = this.#file(part.name);
        const found = file.entry(part.name);
        if (found.shape.join() !== part.shape.join())
          throw new UsageError(
            `${file.path}: ${part.name} has the shape [${found.shape.join(', ')}], config.json implies [${part.shape.join(', ')}]`,
          );
        if (!FLOATS.includes(found.dtype))
          throw new UsageError(`${file.path}: ${part.name} is ${found.dtype}; ${FLOATS.join(', ')} are supported`);
        return found.dtype;
      });
      if (new Set(dtypes).size > 1)
        throw new UsageError(
          `${this.path}: ${parameter.parts.map(({ name }, i) => `${name} is ${dtypes[i]}`).join(', ')}: ` +
            'they are used as one matrix and must have one type; convert the weights first',
        );
      entries.set(parameter.name, { dtype: dtypes[0] ?? 'F32', shape: parameter.shape });
    }
    for (const [name, file] of this.#fileOf)
      if (!known.has(name) && !isIgnored(name, shape))
        throw new UsageError(`${file.path}: holds ${name}, which is not part of the model that config.json describes`);
    return entries;
  }
}

/** Bytes of a tensor. */
export function bytesOf({ dtype, shape }: { readonly dtype: SafeDtype; readonly shape: readonly number[] }): number {
  return shape.reduce((product, extent) => product * extent, dtypeBytes(dtype));
}

/** Tensor → file name. */
function readIndex(path: string): Map<string, string> {
  const parsed = indexSchema.safeParse(readJson(path, INDEX_BYTES));
  if (!parsed.success) throw new UsageError(`${path}: has no weight_map from tensors to files; download it again`);
  const map = new Map(Object.entries(parsed.data.weight_map));
  if (map.size === 0) throw new UsageError(`${path}: its weight_map is empty; download it again`);
  for (const [tensor, file] of map)
    if (
      basename(file) !== file ||
      file === '..' ||
      file === '.' ||
      file.includes('\\') ||
      /\p{Cc}/u.test(file) ||
      !file.endsWith('.safetensors')
    )
      throw new UsageError(
        `${path}: ${tensor} is said to be in ${JSON.stringify(file)}, which is not a .safetensors file of this folder`,
      );
  return map;
}

/** Which file holds each tensor; it must be the one that the index names. */
function locate(
  files: readonly SafetensorsFile[],
  listed: ReadonlyMap<string, string> | null,
  index: string,
): Map<string, SafetensorsFile> {
  const found = new Map<string, SafetensorsFile>();
  for (const file of files)
    for (const name of file.entries.keys()) {
      const other = found.get(name);
      if (other)
        throw new UsageError(`${file.path}: holds ${name}, which ${other.path} holds too; download both again`);
      if (listed && listed.get(name) !== basename(file.path))
        throw new UsageError(`${file.path}: holds ${name}, but ${index} does not say so; download both again`);
      found.set(name, file);
    }
  for (const [name, file] of listed ?? [])
    if (!found.has(name))
      throw new UsageError(`${index}: ${name} is said to be in ${file}, which does not hold it; download both again`);
  return found;
}
