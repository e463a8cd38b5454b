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

/** A model to time, and what it is timed with where the choice leaves it open. */
interface Subject extends TrainCase {
  readonly attentions: readonly Attention[];
  readonly lengths: readonly number[];
  batchSize(length: number): number;
  kernels(length: number): readonly SelectionKernel[];
}
type Attention = Config['model']['attention'];

/** A config as it is. */
function subject(name: string, config: Config, attentions: readonly Attention[] = [config.model.attention]): Subject {
  const { train, runtime } = config;
  const batchSize = () => train.batch_size;
  return { name, config, attentions, lengths: [train.seq_len], batchSize, kernels: () => [runtime.selection_kernel] };
}

/** The default matrix of `bench train --device cuda`: S x kernel, 65,536 tokens per step. */
function gpuSubject(env: Environment, attentions: readonly Attention[] = ['nsa']): Subject {
  const { data, runtime, ...rest } = namedConfig(BASE, env);
  const config = { ...rest, data: { ...data, tokenizer: 'gpt2' }, runtime: { ...runtime, precision: 'bf16' as const } };
  return {
    ...subject('125m', config, attentions),
    lengths: [...SHORT_LENGTHS, ...LONG_LENGTHS],
    batchSize: (length) => Math.max(1, Math.floor(GPU_TOKENS / length)),
    kernels: (length) => (length <= 2048 ? ['adaptive', 'v1', 'v2'] : ['adaptive']),
  };
}

function subjects({ config, attention, device }: CaseChoice, env: Environment): Subject[] {
  const attentions = attention === 'both' ? (['nsa', 'dense'] as const) : attention && [attention];
  if (config !== undefined) return [subject(config, namedConfig(config, env), attentions)];
  if (device === 'cuda') return [gpuSubject(env, attentions)];
  const base = subject(BASE, namedConfig(BASE, env), attentions ?? ['nsa', 'dense']);
  return attention === 'nsa' ? [base] : [base, subject(SMALL_GPT, smallGpt())];
}

/** Cases to time: models by attention, lengths, batch sizes and kernels. Each choice changes only what it names. */
export function trainCases(choice: CaseChoice, env: Environment = {}): TrainCase[] {
  return subjects(choice, env).flatMap((model) => {
    const { name, config } = model;
    const make = (attention: Attention, seq_len: number, batch_size: number, selection_kernel: SelectionKernel) => ({
      name,
      config: parseConfig({
        ...config,
        model: { ...config.model, attention },
        runtime: { ...config.runtime, selection_kernel },
        train: { ...config.train, seq_len, batch_size },
      }),
    });
    return model.attentions.flatMap((attention) =>
      (choice.lengths ?? model.lengths).flatMap((length) =>
        (choice.batchSizes ?? [model.batchSize(length)]).flatMap((batch) => {
          // Dense attention has no selected branch: one case instead of one per kernel.
          const kernels = attention === 'dense' ? [config.runtime.selection_kernel] : choice.kernels;
          return (kernels ?? model.kernels(length)).map((kernel) => make(attention, length, batch, kernel));
        }),
      ),
    );
  });
}

function namedConfig(name: string, env: Environment): Config {
  return name === SMALL_GPT ? smallGpt() : loadConfig({ env, config: name, flags: NO_DATA }).config;
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
