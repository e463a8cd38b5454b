/**
 * Loads a model from its files, and writes the final files of a run. Everything is verified first: a checkpoint by its
 * manifest, final weights by the hash in config.json, and both against the shapes of the config before memory is
 * allocated.
 */
import { renameSync } from 'node:fs';
import { basename, dirname, join, resolve } from 'node:path';
import { parseSavedConfig } from '../config/parse.js';
import type { Config } from '../config/schema.js';
import { createTokenizer, type Tokenizer } from '../data/tokenizer.js';
import { isBuiltInTokenizer } from '../data/tokenizers/built-in.js';
import { TOKENIZER_COMPANIONS } from '../data/tokenizers/huggingface/files.js';
import type { Device } from '../device/device.js';
import { UsageError } from '../errors.js';
import { adapterBase, isAdapterFolder, MergedWeights } from '../exchange/adapter.js';
import { HF_FILES, HfWeights, isHfFolder, readHfModel } from '../exchange/hf-folder.js';
import { copyFile, ensureFolder, fileError, statOrUndefined } from '../files.js';
import { modelFolder } from '../hub/cache.js';
import { isHubName } from '../hub/name.js';
import { LanguageModel } from '../model/language-model.js';
import { parameterCount } from '../model/memory.js';
import { isModelConfig, readModelConfig, writeModelConfig } from '../model/model-config.js';
import type { StoredParameters } from '../model/parameters.js';
import { inFile, type ModelOrigin } from '../model/saved-model.js';
import { type ComputeDtype, defaultDtype, type ModelShape, modelShape } from '../model/shape.js';
import { configAfter } from '../model/sparse-start.js';
import { PackedMatrix, packedBytes, type WeightType } from '../ops/linear/packed.js';
import {
  CHECKPOINT_FILES,
  type FoundCheckpoint,
  findCheckpoint,
  MANIFEST_NAME,
  type Manifest,
  namesNewest,
  openCheckpoint,
  verifyFiles,
} from '../run/checkpoint/read.js';
import { runPaths } from '../run/paths.js';
import { openSafetensors, writeSafetensors } from '../run/safetensors.js';
import {
  changed,
  expectFloatEntry,
  expectNoOthers,
  modelTensors,
  readInto,
  type TensorSource,
} from '../run/tensor-source.js';
import { trefoilVersion } from '../run/version.js';
import { dispose } from '../tensor/dispose.js';
import { type Shape, Tensor } from '../tensor/tensor.js';

/** A model from a file, with what is needed to read and write its text. */
export interface LoadedModel extends Disposable {
  readonly model: LanguageModel;
  readonly tokenizer: Tokenizer;
  /** A final model stores only `model`, `nsa`, the tokenizer and `train.seq_len` of its config; the rest has defaults. */
  readonly config: Config;
  /** Optimizer steps behind the weights. */
  readonly step: number;
  /** The weights file that was loaded. */
  readonly path: string;
  /** Messages about newer checkpoints that are damaged and were skipped. */
  readonly warnings: readonly string[];
  /** Tokens that end a text, besides the tokenizer's separator. */
  readonly endTokens: readonly number[];
  /** Frees the model. */
  free(): void;
}

const FORMS =
  'give a run folder, a checkpoint such as checkpoints/step-100, a model.safetensors, a Hugging Face folder, or hf:owner/name';

/** A model's files: checked, and the weights open but not read. */
export interface LocatedModel {
  readonly shape: ModelShape;
  readonly config: Config;
  readonly weights: TensorSource;
  readonly step: number;
  /** The weights file, or the folder of a Hugging Face model. */
  readonly path: string;
  /** The file with the config, for messages. */
  readonly describedBy: string;
  readonly warnings: readonly string[];
  readonly endTokens: readonly number[];
  /** Source of an imported model; null for a model that was trained here. */
  readonly origin: ModelOrigin | null;
}

/** How `loadModel` holds weights. */
export interface LoadOptions {
  /**
   * `int8`: one byte for each weight of the layers, the embedding and the head, with a scale for each 64 of them. CPU only.
   * Default `file`, which changes no result.
   */
  readonly weights?: 'file' | 'int8';
  /** Holds all weights as f32 tensors, which can be trained. On the CPU reading them is several times slower. */
  readonly trainable?: boolean;
  /**
   * Folder of a LoRA adapter in PEFT's format, which is added to the weights in fp32. On the CPU the adapted matrices are
   * held in fp32 whatever the type in the file, or in int8 with `weights`.
   */
  readonly adapter?: string | undefined;
}

/**
 * `path`: a run folder (its final model, else its newest sound checkpoint), a checkpoint, a file of weights, or a folder
 * with a Hugging Face model; or the name of a model of the hub that is in the cache (`pullModel`). On the CPU the matrices are packed for reading unless they are to be trained.
 */
export function loadModel(
  device: Device,
  path: string,
  dtype: ComputeDtype = defaultDtype(device),
  options: LoadOptions = {},
): LoadedModel {
  if (options.weights === 'int8' && device.kind !== 'cpu')
    throw new UsageError('weights in int8 are for the CPU: use --device cpu, or omit --weights');
  const located = withAdapter(device, locateModel(path), options.adapter);
  const { shape, weights, config, step, warnings, endTokens, origin, describedBy } = located;
  try {
    const model = new LanguageModel(device, shape, new StoredWeights(device, weights, options), dtype);
    try {
      expectNoOthers(weights, model);
      const create = () => inFile(describedBy, () => createTokenizer(config.data.tokenizer));
      // Weights of others may come without a tokenizer, and token ids need none.
      let tokenizer = origin ? null : create();
      return {
        model,
        config,
        step,
        warnings,
        endTokens,
        path: located.path,
        get tokenizer() {
          tokenizer ??= create();
          return tokenizer;
        },
        free: () => model.free(),
        [dispose]: () => model[dispose](),
      };
    } catch (error) {
      model.free();
      throw error;
    }
  } finally {
    weights.close();
  }
}

const TYPES = { F32: 'f32', BF16: 'bf16', F16: 'f16' } as const;

/** Matrices that choose what attention reads, and take little memory: never in int8. */
const EXACT = /\.attention\.(gate|phi_[kv])\./;

/** Matrices begin at multiples of this. */
const ALIGNMENT = 4096;

/** Parameters from their files. On the CPU every matrix is packed, unless it is to be trained. */
class StoredWeights implements StoredParameters {
  readonly #device: Device;
  readonly #source: TensorSource;
  readonly #options: LoadOptions;
  /** One block for all packed matrices: most are too small for huge pages of their own, without which reading is slower. */
  #memory: Tensor | null = null;
  #used = 0;

  constructor(device: Device, source: TensorSource, options: LoadOptions) {
    this.#device = device;
    this.#source = source;
    this.#options = options;
  }

  read(name: string, shape: Shape): Tensor {
    const source = this.#source;
    const type = this.#packedType(name, expectFloatEntry(source, name, shape), shape);
    if (type === null) {
      const value = Tensor.empty(this.#device, shape);
      readInto(source, name, value);
      return value;
    }
    this.#memory ??= Tensor.empty(this.#device, [this.#packedBytes() / 4], 'i32');
    const first = this.#used;
    const bytes = packedBytes(this.#device, shape, type);
    this.#used += aligned(bytes);
    const room = this.#memory.rows(first / 4, (first + bytes) / 4).withOwnStorage();
    const matrix = new PackedMatrix(this.#device, shape, type, room);
    const parts = source.parts(name);
    if (parts === null) {
      const values = Tensor.empty(this.#device, shape);
      readInto(source, name, values);
      matrix.pack(values);
      values.free();
    } else if (!matrix.readRows(parts, TYPES[expectFloatEntry(source, name, shape)])) throw changed(source.path);
    return matrix;
  }

  free(): void {
    this.#memory?.free();
    this.#memory = null;
  }

  /** Null for what is a tensor. */
  #packedType(name: string, dtype: keyof typeof TYPES, shape: Shape): WeightType | null {
    const { weights = 'file', trainable = false } = this.#options;
    if (this.#device.kind !== 'cpu' || trainable || shape.length !== 2) return null;
    return weights === 'int8' && !EXACT.test(name) ? 'int8' : TYPES[dtype];
  }

  #packedBytes(): number {
    return [...this.#source.entries].reduce((sum, [name, { shape }]) => {
      if (shape.length !== 2) return sum;
      const type = this.#packedType(name, expectFloatEntry(this.#source, name, shape), shape);
      return sum + (type === null ? 0 : aligned(packedBytes(this.#device, shape, type)));
    }, 0);
  }
}

function aligned(bytes: number): number {
  return ALIGNMENT * Math.ceil(bytes / ALIGNMENT);
}

/** A located model with an adapter added to its weights, if one is given. The caller closes the weights, in any case. */
export function withAdapter(device: Device, located: LocatedModel, adapter: string | undefined): LocatedModel {
  if (adapter === undefined) return located;
  const { weights, shape } = located;
  try {
    return { ...located, weights: new MergedWeights(device, weights, shape, adapter) };
  } catch (error) {
    weights.close();
    throw error;
  }
}

/** Finds and checks what `loadModel` would load; the caller closes the weights. */
export function locateModel(name: string): LocatedModel {
  const path = modelFolder(name);
  const newest = namesNewest(path) && findCheckpoint(dirname(dirname(path)), path);
  if (newest) return locateCheckpoint(newest);
  const facts = statOrUndefined(path);
  if (!facts) throw new UsageError(`${path}: there is no such file or folder; ${FORMS}`);
  return facts.isDirectory() ? locateInFolder(path) : locateFile(path);
}

function locateInFolder(folder: string): LocatedModel {
  if (exists(join(folder, MANIFEST_NAME))) return locateCheckpoint(openCheckpoint(folder));
  if (isHfFolder(folder)) return locateForeign(folder);
  const { model, modelConfig, checkpoints } = runPaths(folder);
  if (isAdapterFolder(folder)) throw adapterAlone(folder, adapterBase(folder), folder);
  if (exists(model) && exists(modelConfig)) return locateFinal(model);
  const found = findCheckpoint(folder, 'auto');
  if (found) return locateCheckpoint(found);
  if (exists(model)) throw new UsageError(`${modelConfig}: is missing; copy it from the folder of the run`);
  const reason = exists(checkpoints) ? 'has no checkpoint yet' : 'holds no model';
  throw new UsageError(`${folder}: ${reason}; ${FORMS}`);
}

function locateFile(path: string): LocatedModel {
  if (!path.endsWith('.safetensors')) throw new UsageError(`${path}: is not a model; ${FORMS}`);
  const folder = dirname(path);
  // The weights file of a checkpoint was named instead of its folder.
  if (exists(join(folder, MANIFEST_NAME)) && basename(path) === CHECKPOINT_FILES.model) return locateInFolder(folder);
  const { modelConfig } = runPaths(folder);
  if (!exists(modelConfig))
    throw new UsageError(`${modelConfig}: is missing; copy it from the folder of the run to where ${path} lies`);
  return isHfFolder(folder) ? locateForeign(folder) : locateFinal(path);
}

function locateFinal(path: string): LocatedModel {
  const { modelConfig } = runPaths(dirname(path));
  const { saved, config } = readModelConfig(modelConfig);
  if (saved.weights?.file === basename(path)) {
    const { file, ...digest } = saved.weights;
    verifyFiles(dirname(path), { files: { [file]: digest } } as Manifest);
  }
  return {
    ...openWeights(path, modelConfig, config, saved.vocab_size),
    step: saved.step,
    warnings: [],
    endTokens: saved.end_tokens ?? [],
    origin: saved.origin ?? null,
  };
}

function locateCheckpoint(found: FoundCheckpoint): LocatedModel {
  const path = join(found.path, CHECKPOINT_FILES.model);
  const state = join(found.path, CHECKPOINT_FILES.state);
  const config = configAfter(
    inFile(state, () => parseSavedConfig(found.state['config'])),
    found.step,
  );
  if (config.train.lora !== null) throw adapterAlone(found.path, config.train.init_from, config.train.out_dir);
  const warnings = found.skipped.map((skipped) => `checkpoint ${skipped.path} is skipped: ${skipped.reason}`);
  return {
    ...openWeights(path, state, config, embeddingRows(path)),
    step: found.step,
    warnings,
    endTokens: [],
    origin: null,
  };
}

/** The error for what holds adapters without the weights that they adapt. */
function adapterAlone(path: string, base: string | null, adapter: string): UsageError {
  const remedy = `use --model ${base ?? 'with the model it adapts'} --adapter ${adapter}`;
  return new UsageError(`${path}: holds an adapter, not a model; ${remedy}`);
}

function locateForeign(folder: string): LocatedModel {
  const model = readHfModel(folder);
  const { shape, config, endTokens, origin } = model;
  return {
    shape,
    config,
    endTokens,
    origin,
    weights: new HfWeights(model),
    step: 0,
    path: folder,
    describedBy: join(folder, HF_FILES.config),
    warnings: [],
  };
}

/** `describedBy` is the file that holds the config, for messages. */
function openWeights(path: string, describedBy: string, config: Config, vocabulary: number) {
  const shape = inFile(describedBy, () => modelShape(config, vocabulary));
  const [needed, held] = [parameterCount(shape), numbersIn(path)];
  if (needed !== held)
    throw new UsageError(
      `${path}: holds ${held} numbers, but ${describedBy} describes a model of ${needed}: the two do not belong together; ` +
        'take both from the same run',
    );
  return { shape, config, path, describedBy, weights: openSafetensors(path, { links: 'in model' }) };
}

function numbersIn(path: string): number {
  const file = openSafetensors(path, { links: 'in model' });
  file.close();
  let total = 0;
  for (const { shape } of file.entries.values()) total += shape.reduce((product, extent) => product * extent, 1);
  return total;
}

/** Vocabulary size, from the weights: the config of a checkpoint may leave it to the tokenizer or the data. */
function embeddingRows(path: string): number {
  const file = openSafetensors(path, { links: 'in model' });
  file.close();
  const { shape } = file.entry('embedding');
  if (shape.length !== 2 || shape[0] < 1)
    throw new UsageError(
      `${path}: embedding has the shape [${shape.join(', ')}], not [vocabulary, dim]; use another checkpoint`,
    );
  return shape[0];
}

/**
 * Writes the final model of a run: into a folder, as model.safetensors with config.json, or to a file of any name that
 * ends in .safetensors, with config.json beside it. A tokenizer.json is copied along, so that the folder can be moved.
 */
export function writeFinalModel(
  path: string,
  model: LanguageModel,
  config: Config,
  { step = config.train.steps }: { step?: number } = {},
): void {
  const weights = path.endsWith('.safetensors') ? path : runPaths(path).model;
  const folder = dirname(weights);
  const { modelConfig } = runPaths(folder);
  try {
    ensureFolder(folder);
  } catch (error) {
    throw fileError('create', folder, error);
  }
  const file = basename(weights);
  const digest = writeSafetensors(weights, modelTensors(model), { format: 'trefoil' }, { fsync: true });
  keepForeign(modelConfig);
  // Last: it holds the hash of the weights, so a crash between the two cannot join new weights to an old description.
  writeModelConfig(modelConfig, {
    trefoil_version: trefoilVersion(),
    step,
    tokenizer: placeTokenizer(folder, config.data.tokenizer),
    vocab_size: model.shape.vocabSize,
    model: config.model,
    nsa: configAfter(config, step).nsa,
    seq_len: config.train.seq_len,
    weights: { file, ...digest },
  });
}

/** Renames a config.json that another program wrote, instead of overwriting it. */
function keepForeign(path: string): void {
  if (!exists(path) || isModelConfig(path)) return;
  try {
    renameSync(path, `${path}.before-trefoil`);
  } catch (error) {
    throw fileError('rename', path, error);
  }
}

/** Copies tokenizer files into `folder`; returns the name of the tokenizer for config.json. */
function placeTokenizer(folder: string, spec: string): string {
  if (isBuiltInTokenizer(spec)) return spec;
  const path = isHubName(spec) ? cachedFolder(spec) : spec;
  if (path === null) return spec;
  const source = statOrUndefined(path)?.isDirectory() ? join(path, 'tokenizer.json') : path;
  // The file was deleted during the run. Failing here would lose the weights.
  if (!exists(source)) return resolve(source);
  copyFile(source, join(folder, 'tokenizer.json'), { links: 'in model' });
  for (const name of TOKENIZER_COMPANIONS) {
    const companion = join(dirname(source), name);
    if (exists(companion)) copyFile(companion, join(folder, name), { links: 'in model' });
  }
  return 'tokenizer.json';
}

/** Null where the model was removed from the cache during the run. */
function cachedFolder(name: string): string | null {
  try {
    return modelFolder(name);
  } catch (error) {
    if (error instanceof UsageError) return null;
    throw error;
  }
}

function exists(path: string): boolean {
  return statOrUndefined(path) !== undefined;
}
