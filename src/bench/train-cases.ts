/** Cases of `bench train`: models by config name, and the default matrix. */
import { layerOfTree } from '../config/layer.js';
import { loadConfig } from '../config/load.js';
import { parseConfig } from '../config/parse.js';
import type { Config } from '../config/schema.js';
import { createTokenizer } from '../data/tokenizer.js';
import type { DeviceKind } from '../device/device.js';
import type { Environment } from '../environment.js';
import { type ModelShape, modelShape } from '../model/shape.js';
import type { SelectionKernel } from '../ops/attention/selected/op.js';

/** A config to time. */
export interface TrainCase {
  /** Name of its row. */
  readonly name: string;
  readonly config: Config;
}

/** Which cases `trainCases` returns. */
export interface CaseChoice {
  /** A shipped config, a file, or `small-gpt`; default: the matrix of docs/benchmarks.md. */
  readonly config?: string | undefined;
  /** Default: from the config. */
  readonly attention?: 'nsa' | 'dense' | 'both' | undefined;
  readonly lengths?: readonly number[] | undefined;
  readonly batchSizes?: readonly number[] | undefined;
  /** Kernels of the selected branch. Default: from the config. */
  readonly kernels?: readonly SelectionKernel[] | undefined;
  /** The device: a GPU gets another default matrix, in bf16 and with GPT-2's vocabulary. */
  readonly device?: DeviceKind | undefined;
}

/** The dense GPT that other frameworks are compared on (bench/peers/cpu). */
export const SMALL_GPT = 'small-gpt';
/** The 125m shape; its tokenizer is `byte` unless the environment overrides it. */
const BASE = 'base';

/** Lengths of the GPU's matrix: all kernels up to 2048, beyond it the default one. */
const SHORT_LENGTHS = [512, 1024, 2048];
const LONG_LENGTHS = [8192, 32_768, 65_536];
/** Benchmarks make their own tokens: the data of a config need not be there. */
const NO_DATA = layerOfTree({ data: { source: 'synthetic' } }, 'bench', () => 'bench');

/** Tokens of a step on the GPU, whatever the length. */
const GPU_TOKENS = 65_536;

/** The default matrix of `bench train --device cuda`: S x kernel, always 65,536 tokens per step. */
function gpuMatrix(env: Environment, choice: CaseChoice): TrainCase[] {
  const { config } = loadConfig({ env, config: BASE });
  const make = (length: number, kernel: SelectionKernel, attention: 'nsa' | 'dense'): TrainCase => ({
    name: '125m',
    config: parseConfig({
      ...config,
      model: { ...config.model, attention },
      data: { ...config.data, tokenizer: 'gpt2' },
      runtime: { ...config.runtime, precision: 'bf16', selection_kernel: kernel },
      train: { ...config.train, seq_len: length, batch_size: Math.max(1, Math.floor(GPU_TOKENS / length)) },
    }),
  });
  const wanted = choice.attention ?? 'nsa';
  const lengths = choice.lengths ?? [...SHORT_LENGTHS, ...LONG_LENGTHS];
  const sparse = lengths.flatMap((length) => {
    const kernels = choice.kernels ?? (length <= 2048 ? (['adaptive', 'v1', 'v2'] as const) : (['adaptive'] as const));
    return kernels.map((kernel) => make(length, kernel, 'nsa'));
  });
  const dense = lengths.map((length) => make(length, 'adaptive', 'dense'));
  return [...(wanted === 'dense' ? [] : sparse), ...(wanted === 'nsa' ? [] : dense)];
}

/** Cases to time: configs by lengths and batch sizes. */
export function trainCases(choice: CaseChoice, env: Environment = {}): TrainCase[] {
  if (choice.device === 'cuda' && choice.config === undefined && !choice.batchSizes) return gpuMatrix(env, choice);
  const isMatrix = choice.config === undefined;
  const name = choice.config ?? BASE;
  const config = name === SMALL_GPT ? smallGpt() : loadConfig({ env, config: name, flags: NO_DATA }).config;
  const attention = choice.attention ?? (isMatrix ? 'both' : config.model.attention);
  const cases = (attention === 'both' ? (['nsa', 'dense'] as const) : [attention]).flatMap((kind) =>
    (choice.lengths ?? [config.train.seq_len]).flatMap((length) =>
      (choice.batchSizes ?? [config.train.batch_size]).flatMap((batch) =>
        (choice.kernels ?? [config.runtime.selection_kernel]).map((kernel) => ({
          name,
          config: parseConfig({
            ...config,
            model: { ...config.model, attention: kind },
            runtime: { ...config.runtime, selection_kernel: kernel },
            train: { ...config.train, seq_len: length, batch_size: batch },
          }),
        })),
      ),
    ),
  );
  const isWhole = isMatrix && attention !== 'nsa' && !choice.lengths && !choice.batchSizes;
  return isWhole ? [...cases, { name: SMALL_GPT, config: smallGpt() }] : cases;
}

function smallGpt(): Config {
  return parseConfig({
    model: {
      dim: 256,
      n_layers: 4,
      n_heads: 4,
      n_kv_groups: 4,
      d_k: 64,
      d_v: 64,
      mlp_ratio: 4,
      attention: 'dense',
      vocab_size: 1024,
    },
    train: { seq_len: 256, batch_size: 4 },
  });
}

export function caseShape({ config }: TrainCase): ModelShape {
  const { model, data } = config;
  return modelShape(config, model.vocab_size ?? data.vocab_size ?? createTokenizer(data.tokenizer).vocabSize);
}

/** The sequences of one micro-batch, all of one length. */
export function caseLengths({ config: { train } }: TrainCase): number[] {
  return new Array<number>(train.batch_size).fill(train.seq_len);
}
