/** Log-probabilities of many positions in two arrays: as objects they take seconds on their way to another thread. */
import type { PositionLogprobs } from '../infer/engine/request.js';

export interface PackedLogprobs {
  /** Entries of a position: its token and the most probable ones. */
  readonly width: number;
  readonly tokens: Int32Array;
  readonly values: Float64Array;
}

/** All positions list equally many tokens. */
export function packLogprobs(positions: readonly PositionLogprobs[]): PackedLogprobs {
  const width = 1 + (positions[0]?.top.length ?? 0);
  const tokens = new Int32Array(positions.length * width);
  const values = new Float64Array(positions.length * width);
  for (const [i, position] of positions.entries())
    for (let k = 0; k < width; k++) {
      const { token, logprob } = k === 0 ? position : position.top[k - 1];
      tokens[i * width + k] = token;
      values[i * width + k] = logprob;
    }
  return { width, tokens, values };
}

/** Null beyond the last position. */
export function logprobsAt({ width, tokens, values }: PackedLogprobs, i: number): PositionLogprobs | null {
  if (i * width >= tokens.length) return null;
  const entry = (k: number) => ({ token: tokens[i * width + k], logprob: values[i * width + k] });
  return { ...entry(0), top: Array.from({ length: width - 1 }, (_, k) => entry(k + 1)) };
}
