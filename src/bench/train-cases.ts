/** What `bench train` measures when it is not told: the matrix of docs/benchmarks.md. */
import { parseConfig } from '../config/parse.js';
import type { Config } from '../config/schema.js';
import { UsageError } from '../errors.js';
import type { TrainCase } from './train.js';

/** The dense GPT that frameworks are compared with (bench/peers/cpu): 3.7 million parameters. */
export const SMALL_GPT = 'small-gpt';

function smallGpt(): Config {
  return parseConfig({
    model: {
      ...{ dim: 256, n_layers: 4, n_heads: 4, n_kv_groups: 4, d_k: 64, d_v: 64, mlp_ratio: 4 },
      ...{ attention: 'dense', vocab_size: 1024 },
    },
    train: { seq_len: 256, batch_size: 4 },
  });
}
