/** What `bench train` measures: models by the name of a config, and the matrix it takes when it is not told. */
import { loadConfig } from '../config/load.js';
import { parseConfig } from '../config/parse.js';
import type { Config } from '../config/schema.js';
import { createTokenizer } from '../data/tokenizer.js';
import { type ModelShape, modelShape } from '../model/shape.js';

export interface TrainCase {
  /** What its row is called. */
  readonly name: string;
  readonly config: Config;
}

export interface CaseChoice {
  /** A shipped config, a file, or `small-gpt`; none = the matrix of docs/benchmarks.md. */
  readonly config?: string | undefined;
  /** None = as the config says. */
  readonly attention?: 'nsa' | 'dense' | 'both' | undefined;
  readonly lengths?: readonly number[] | undefined;
  readonly batchSizes?: readonly number[] | undefined;
}

/** The dense GPT that other frameworks are compared on (bench/peers/cpu). */
export const SMALL_GPT = 'small-gpt';
/** The 125m shape; its tokenizer is `byte` unless the environment says otherwise. */
const BASE = 'base';

export function trainCases(choice: CaseChoice, env: Readonly<Record<string, string | undefined>> = {}): TrainCase[] {
  const isMatrix = choice.config === undefined;
  const name = choice.config ?? BASE;
  const config = name === SMALL_GPT ? smallGpt() : loadConfig({ env, config: name }).config;
  const attention = choice.attention ?? (isMatrix ? 'both' : config.model.attention);
  const cases = (attention === 'both' ? (['nsa', 'dense'] as const) : [attention]).flatMap((kind) =>
    (choice.lengths ?? [config.train.seq_len]).flatMap((length) =>
      (choice.batchSizes ?? [config.train.batch_size]).map((batch) => ({
        name,
        config: parseConfig({
          ...config,
          model: { ...config.model, attention: kind },
          train: { ...config.train, seq_len: length, batch_size: batch },
        }),
      })),
    ),
  );
  const isWhole = isMatrix && attention !== 'nsa' && !choice.lengths && !choice.batchSizes;
  return isWhole ? [...cases, { name: SMALL_GPT, config: smallGpt() }] : cases;
}

function smallGpt(): Config {
  return parseConfig({
    model: {
      ...{ dim: 256, n_layers: 4, n_heads: 4, n_kv_groups: 4, d_k: 64, d_v: 64, mlp_ratio: 4 },
      ...{ attention: 'dense', vocab_size: 1024 },
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
