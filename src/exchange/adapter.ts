/**
 * Low-rank adapters in the files of PEFT: adapter_config.json and adapter_model.safetensors. Written from a model that was
 * trained with `train.lora`; read to be added to the weights of a model, W + scale * B A.
 */
import { join } from 'node:path';
import type { Device } from '../device/device.js';
import { UsageError } from '../errors.js';
import { ensureFolder, fileError, statOrUndefined, writeFileAtomic } from '../files.js';
import type { Adapter } from '../model/adapters.js';
import { ALL_LINEAR, type LinearLayer, layerKind, linearLayers } from '../model/linear-layers.js';
import { readJson } from '../model/model-config.js';
import { inFile } from '../model/saved-model.js';
import type { ModelShape } from '../model/shape.js';
import { matrixProducts } from '../ops/linear/op.js';
import { openSafetensors, type SafetensorsFile, writeSafetensors } from '../run/safetensors.js';
import { type SafeTensor, toFloat32 } from '../run/safetensors-format.js';
import { namedTensors, type TensorSource } from '../run/tensor-source.js';
import { bytesOf as rawBytes, Tensor } from '../tensor/tensor.js';
import { withTimeLimit } from '../time-limit.js';
import * as z from '../zod.js';

export const ADAPTER_FILES = { config: 'adapter_config.json', weights: 'adapter_model.safetensors' } as const;

/** In front of the names of modules in PEFT's files: the wrapper and the wrapped model. */
const PREFIX = 'base_model.model.';
/** The output matrix, which an adapter of another program may have. */
const HEAD = 'lm_head';
/** A copy of the head of the model, which PEFT saves beside an adapter of the head. */
const HEAD_COPY = /^(?:base_model\.model\.)?lm_head\.base_layer\.weight$/;
/** The copy may be in bf16. */
const HEAD_TOLERANCE = 2 ** -8;
/** Limit for one pattern of a stranger's file. */
const PATTERN_MS = 200;

/** Every layer looks through all of them. */
const MAX_PATTERNS = 10_000;

/** An expression for names of layers. */
const pattern = z.string().refine((text) => {
  try {
    return new RegExp(text) instanceof RegExp;
  } catch {
    return false;
  }
});
const patternsOf = (value: z.ZodNumber) =>
  z
    .record(pattern, value)
    .refine((patterns) => Object.keys(patterns).length <= MAX_PATTERNS, `more than ${MAX_PATTERNS} patterns`)
    .nullish();
/** A variant of LoRA that is off. */
const off = z.literal([false, null]).optional();
const savedConfig = z.looseObject({
  peft_type: z.literal('LORA'),
  base_model_name_or_path: z.string().nullable().optional(),
  r: z.int().min(1),
  lora_alpha: z.number().positive(),
  rank_pattern: patternsOf(z.int().min(1)),
  alpha_pattern: patternsOf(z.number().positive()),
  use_rslora: z.boolean().nullish(),
  // Others, such as pissa, also change the weights that the adapter is added to.
  init_lora_weights: z.union([z.boolean(), z.enum(['gaussian', 'eva', 'orthogonal'])]).nullish(),
  fan_in_fan_out: off,
  use_dora: off,
  use_qalora: off,
  use_bdlora: off,
  kasa_config: off,
  monteclora_config: off,
  arrow_config: off,
  layer_replication: off,
  alora_invocation_tokens: off,
  bias: z.literal('none').nullish(),
  modules_to_save: z.array(z.string()).max(0).nullish(),
});
type SavedConfig = z.infer<typeof savedConfig>;

/** The model and the settings of an adapter. */
export interface AdapterOrigin {
  /** The model, as it was named. */
  readonly base: string;
  readonly rank: number;
  readonly alpha: number;
  readonly targets: readonly string[];
}

/** Writes the adapters of a model into a folder. The config comes last: a folder that has one is complete. */
export function writeAdapter(folder: string, adapters: readonly Adapter[], origin: AdapterOrigin): void {
  try {
    ensureFolder(folder);
  } catch (error) {
    throw fileError('create', folder, error);
  }
  const tensors = adapters.flatMap(({ layer, down, up }) => [
    [`${PREFIX}model.${layer.name}.lora_A.weight`, down.value] as const,
    [`${PREFIX}model.${layer.name}.lora_B.weight`, up.value] as const,
  ]);
  writeSafetensors(join(folder, ADAPTER_FILES.weights), namedTensors(tensors), { format: 'pt' }, { fsync: true });
  const kinds = [...new Set(adapters.map(({ layer }) => layerKind(layer)))];
  const targets = origin.targets.includes(ALL_LINEAR) ? kinds : origin.targets;
  const config = {
    alpha_pattern: {},
    auto_mapping: null,
    base_model_name_or_path: origin.base,
    bias: 'none',
    fan_in_fan_out: false,
    inference_mode: true,
    init_lora_weights: true,
    layers_pattern: null,
    layers_to_transform: null,
    lora_alpha: origin.alpha,
    lora_dropout: 0,
    modules_to_save: null,
    peft_type: 'LORA',
    r: origin.rank,
    rank_pattern: {},
    revision: null,
    target_modules: targets,
    task_type: 'CAUSAL_LM',
    use_dora: false,
    use_rslora: false,
  };
  writeFileAtomic(join(folder, ADAPTER_FILES.config), `${JSON.stringify(config, null, 2)}\n`);
}

/** Whether a folder holds an adapter. */
export function isAdapterFolder(folder: string): boolean {
  return statOrUndefined(join(folder, ADAPTER_FILES.config)) !== undefined;
}

/** The model that an adapter was trained for, as it was named; null if its files do not say. */
export function adapterBase(folder: string): string | null {
  return readConfig(folder).base_model_name_or_path ?? null;
}

function readConfig(folder: string): SavedConfig {
  const path = join(folder, ADAPTER_FILES.config);
  if (!statOrUndefined(path))
    throw new UsageError(`${path}: is missing; --adapter takes the folder of an adapter in PEFT's format`);
  const parsed = savedConfig.safeParse(readJson(path));
  if (parsed.success) return parsed.data;
  const [{ path: key, message }] = parsed.error.issues;
  throw new UsageError(`${path}: ${key.join('.') || 'the file'}: ${message}; only plain LoRA adapters are supported`);
}

/** The addition to some rows of a parameter. */
interface Addition {
  readonly layer: LinearLayer;
  readonly down: string;
  readonly up: string;
  readonly rank: number;
  readonly scale: number;
}

/**
 * The weights of a model with an adapter added: adapted matrices are computed in fp32 when they are read, and are F32
 * whatever the type in the model's file. All others are those of the file. Closes both.
 */
export class MergedWeights implements TensorSource {
  readonly path: string;
  readonly entries: TensorSource['entries'];
  readonly #device: Device;
  readonly #base: TensorSource;
  readonly #file: SafetensorsFile;
  readonly #additions: ReadonlyMap<string, readonly Addition[]>;
  /** The matrix that was computed last: it may be read in pieces. */
  #last: { readonly name: string; readonly data: Uint8Array } | null = null;

  /** `folder`: that of the adapter. Throws if it does not belong to a model of this shape. */
  constructor(device: Device, base: TensorSource, shape: ModelShape, folder: string) {
    this.path = base.path;
    this.#device = device;
    this.#base = base;
    const config = readConfig(folder);
    this.#file = openSafetensors(join(folder, ADAPTER_FILES.weights), { links: 'in model' });
    try {
      this.#additions = inFile(this.#file.path, () => {
        const additions = additionsOf(this.#file, config, shape);
        this.#expectSameHead();
        return additions;
      });
    } catch (error) {
      this.#file.close();
      throw error;
    }
    const adapted = (name: string, entry: { readonly shape: readonly number[] }) =>
      this.#additions.has(name) ? ({ dtype: 'F32', shape: entry.shape } as const) : null;
    this.entries = new Map(Array.from(base.entries, ([name, entry]) => [name, adapted(name, entry) ?? entry]));
  }

  read(name: string): SafeTensor {
    const additions = this.#additions.get(name);
    if (!additions) return this.#base.read(name);
    if (this.#last?.name !== name) this.#last = { name, data: this.#merge(name, additions) };
    return { dtype: 'F32', shape: [...this.#base.entries.get(name)!.shape], data: this.#last.data };
  }

  *pieces(name: string, from: number, to: number): Generator<Uint8Array> {
    if (this.#additions.has(name)) yield this.read(name).data.subarray(from, to);
    else yield* this.#base.pieces(name, from, to);
  }

  parts(name: string) {
    return this.#additions.has(name) ? null : this.#base.parts(name);
  }

  close(): void {
    this.#file.close();
    this.#base.close();
  }

  #expectSameHead(): void {
    const name = [...this.#file.entries.keys()].find((one) => HEAD_COPY.test(one));
    if (name === undefined) return;
    const [copy, head] = [this.#file.read(name), this.#base.read('head')].map(toFloat32);
    const isSame = (value: number, i: number) => Math.abs(value - copy![i]) <= HEAD_TOLERANCE * Math.abs(value);
    if (copy?.length !== head?.length || !head?.every(isSame))
      throw new UsageError(`${name} is not the head of this model; the adapter is one of another model`);
  }

  #merge(name: string, additions: readonly Addition[]): Uint8Array {
    const device = this.#device;
    const read = this.#base.read(name);
    const values = toFloat32(read);
    if (!values) throw new UsageError(`${this.path}: ${name} is ${read.dtype}, to which nothing can be added`);
    for (const { layer, down, up, rank, scale } of additions) {
      const { from, outputs, inputs } = layer;
      const rows = values.subarray(from * inputs, (from + outputs) * inputs);
      const c = Tensor.from(device, rows, [1, outputs, inputs]);
      const a = Tensor.from(device, toFloat32(this.#file.read(up))!, [1, outputs, rank]);
      const b = Tensor.from(device, toFloat32(this.#file.read(down))!, [1, rank, inputs]);
      const d = Tensor.empty(device, [1, outputs, inputs]);
      matrixProducts(device, { a, b, c, d, alpha: scale, beta: 1 });
      rows.set(d.read());
      for (const tensor of [a, b, c, d]) tensor.free();
    }
    return rawBytes(values);
  }
}

/** The additions by parameter. Every tensor of the file must belong to a layer of the model, in its size. */
function additionsOf(file: SafetensorsFile, config: SavedConfig, shape: ModelShape): Map<string, Addition[]> {
  const head: LinearLayer = { name: HEAD, parameter: 'head', from: 0, outputs: shape.vocabSize, inputs: shape.dim };
  const layers = new Map(
    [...linearLayers(shape), ...(shape.tieEmbeddings ? [] : [head])].map((layer) => [layer.name, layer]),
  );
  const found = new Map<string, { A?: string; B?: string }>();
  for (const name of file.entries.keys()) {
    if (layers.has(HEAD) && HEAD_COPY.test(name)) continue;
    const match = /^(?:base_model\.model\.)?(?:model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight$/.exec(name);
    const layer = match?.[1].replace(/^(layers\.\d+)\.attn\./, '$1.self_attn.');
    if (!match || !layer || !layers.has(layer))
      throw new UsageError(`${name} belongs to no linear layer of this model; the adapter is one of another model`);
    found.set(layer, { ...found.get(layer), [match[2]]: name });
  }
  if (found.size === 0) throw new UsageError('holds no adapter; use the file as PEFT wrote it');
  const additions = new Map<string, Addition[]>();
  for (const [name, { A: down, B: up }] of found) {
    const layer = layers.get(name)!;
    if (down === undefined || up === undefined)
      throw new UsageError(`${name} has only one of lora_A and lora_B; copy the adapter again`);
    const rank = patterned(config.rank_pattern, name) ?? config.r;
    const alpha = patterned(config.alpha_pattern, name) ?? config.lora_alpha;
    expectSize(file, down, [rank, layer.inputs]);
    expectSize(file, up, [layer.outputs, rank]);
    const scale = alpha / (config.use_rslora ? Math.sqrt(rank) : rank);
    additions.set(layer.parameter, [...(additions.get(layer.parameter) ?? []), { layer, down, up, rank, scale }]);
  }
  return additions;
}

/** The value of a pattern, an expression for the end of the name of a layer, as PEFT reads it: the first that matches. */
function patterned(patterns: Readonly<Record<string, number>> | null | undefined, layer: string): number | undefined {
  const name = layer === HEAD ? layer : `model.${layer}`;
  const matches = (pattern: string) =>
    withTimeLimit(
      PATTERN_MS,
      () => new RegExp(`^(.*\\.)?(${pattern})$`).test(name),
      () => {
        throw new UsageError(
          `the pattern ${pattern} of ${ADAPTER_FILES.config} takes too long to match; name layers instead`,
        );
      },
    );
  return Object.entries(patterns ?? {}).find(([pattern]) => matches(pattern))?.[1];
}

function expectSize(file: SafetensorsFile, name: string, size: readonly number[]): void {
  const { dtype, shape } = file.entry(name);
  if (dtype !== 'F32' && dtype !== 'BF16' && dtype !== 'F16')
    throw new UsageError(`${name} is ${dtype}; F32, BF16 and F16 are supported`);
  if (shape.join() === size.join()) return;
  throw new UsageError(
    `${name} has the shape [${shape.join(', ')}], this model needs [${size.join(', ')}]; the adapter is one of another model`,
  );
}
