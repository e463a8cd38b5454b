/**
 * From logits to the next token: repetition penalty, temperature, top-k, top-p (of the mass that top-k left), min-p, then
 * a draw. docs/explain/decoding.md gives the formulas.
 *
 * Draw i is a function of (seed, i) alone (Philox, as for weights): the same seed gives the same tokens on every
 * machine that computes the same logits, whatever was drawn before.
 */
import { ExitCode, TrefoilError, UsageError } from '../errors.js';
import { philox } from '../tensor/random/reference.js';

/** How the next token is drawn from the logits. */
export interface SamplingOptions {
  /** Divides the logits. 0 = always the most probable token. Default 1. */
  readonly temperature?: number;
  /** Keeps the k most probable tokens; 0 = all, the default. */
  readonly topK?: number;
  /** Keeps the fewest tokens whose probabilities reach this sum; 1 = all, the default. */
  readonly topP?: number;
  /** Keeps tokens at least this fraction as probable as the best; 0 = all, the default. */
  readonly minP?: number;
  /** For tokens of the context: positive logits are divided by it, others multiplied. 1 = none, the default. */
  readonly repetitionPenalty?: number;
  /** Seed of the draws, an integer from 0 below 2^53. Default 0. */
  readonly seed?: number;
}

/** The index of the token chosen for draw number `draw`; `seen` are the tokens of the context, for the penalty. */
export type Sampler = (logits: Float32Array, draw: number, seen?: Iterable<number>) => number;

/** Logits that are NaN or infinite: training diverged, or the weights were damaged. */
export class UnusableLogits extends TrefoilError {
  constructor(reason: string) {
    super(`${reason}: the model's weights are not sound; use an earlier checkpoint`, ExitCode.nonFinite);
  }
}

export function createSampler(options: SamplingOptions = {}): Sampler {
  const { temperature = 1, topK = 0, topP = 1, minP = 0, repetitionPenalty = 1, seed = 0 } = options;
  if (!(Number.isFinite(temperature) && temperature >= 0))
    throw new UsageError(`temperature: ${temperature} is not allowed; a number from 0 (greedy)`);
  if (!(Number.isSafeInteger(topK) && topK >= 0))
    throw new UsageError(`top-k: ${topK} is not allowed; a whole number from 0 (all tokens)`);
  if (!(topP > 0 && topP <= 1))
    throw new UsageError(`top-p: ${topP} is not allowed; a number above 0, up to 1 (all tokens)`);
  if (!(minP >= 0 && minP <= 1))
    throw new UsageError(`min-p: ${minP} is not allowed; a number from 0 (all tokens) to 1`);
  if (!(Number.isFinite(repetitionPenalty) && repetitionPenalty > 0))
    throw new UsageError(`repetition-penalty: ${repetitionPenalty} is not allowed; a number above 0, 1 for none`);
  if (!(Number.isSafeInteger(seed) && seed >= 0))
    throw new UsageError(`seed: ${seed} is not allowed; a whole number from 0 below 2^53`);
  return (given, draw, seen = []) => {
    const logits = repetitionPenalty === 1 ? given : penalized(given, seen, repetitionPenalty);
    const best = mostProbable(logits);
    if (temperature === 0) return best;
    const weigh = (token: number) => Math.exp((logits[token] - logits[best]) / temperature);
    const kept = nearBest(nucleus(logits, largest(logits, topK), weigh, topP), minP);
    return pick(kept, uniform(seed, draw));
  };
}

/** Whether these options always choose the argmax of the unchanged logits. */
export function isArgmax({ temperature = 1, repetitionPenalty = 1 }: SamplingOptions = {}): boolean {
  return temperature === 0 && repetitionPenalty === 1;
}

function penalized(logits: Float32Array, seen: Iterable<number>, penalty: number): Float32Array {
  const result = logits.slice();
  for (const token of new Set(seen)) {
    const logit = result[token];
    result[token] = logit > 0 ? logit / penalty : logit * penalty;
  }
  return result;
}

/** The best token's weight is 1. */
function nearBest(kept: Weighed, minP: number): Weighed {
  if (minP === 0) return kept;
  const near = kept.tokens.flatMap((token, i) => (kept.weights[i] >= minP ? [{ token, weight: kept.weights[i] }] : []));
  return weighed(
    near.map(({ token }) => token),
    near.map(({ weight }) => weight),
  );
}

/** The lowest index among equals. */
function mostProbable(logits: Float32Array): number {
  let best = -1;
  for (let token = 0; token < logits.length; token++) {
    const logit = logits[token];
    // -Infinity rules a token out and is valid.
    if (Number.isNaN(logit) || logit === Number.POSITIVE_INFINITY)
      throw new UnusableLogits(`the logit of token ${token} is ${logit}`);
    if (logit > (best < 0 ? Number.NEGATIVE_INFINITY : logits[best])) best = token;
  }
  if (best < 0) throw new UnusableLogits(`none of ${logits.length} tokens has a finite logit`);
  return best;
}

/** The `k` tokens of the largest logits (all when 0), the lower index first among equals, in ascending order. */
function largest(logits: Float32Array, k: number): number[] {
  if (k === 0 || k >= logits.length) return Array.from(logits, (_, token) => token);
  // A typed array sorts by number without a callback: much faster than sorting the indices.
  const limit = logits.slice().sort()[logits.length - k];
  let atLimit = k;
  for (const logit of logits) if (logit > limit) atLimit -= 1;
  const kept: number[] = [];
  for (let token = 0; token < logits.length; token++) {
    if (logits[token] > limit) kept.push(token);
    else if (logits[token] === limit && atLimit > 0) {
      kept.push(token);
      atLimit -= 1;
    }
  }
  return kept;
}

interface Weighed {
  readonly tokens: readonly number[];
  readonly weights: readonly number[];
  /** Sum of the weights. */
  readonly mass: number;
}

function nucleus(
  logits: Float32Array,
  tokens: readonly number[],
  weigh: (token: number) => number,
  p: number,
): Weighed {
  const all = weighed(tokens, tokens.map(weigh));
  if (p === 1) return all;
  // All tokens below (1 - p) / count together have less than 1 - p: they are never needed, and few remain to sort.
  const least = ((1 - p) * all.mass) / tokens.length;
  const order = tokens.filter((_, i) => all.weights[i] >= least);
  // Sort by logit: weights of different logits may round to the same number.
  order.sort((a, b) => logits[b] - logits[a] || a - b);
  const weights = order.map(weigh);
  let count = 0;
  for (let reached = 0; count < order.length && reached < p * all.mass; count++) reached += weights[count];
  return weighed(order.slice(0, count), weights.slice(0, count));
}

function weighed(tokens: readonly number[], weights: readonly number[]): Weighed {
  let mass = 0;
  for (const weight of weights) mass += weight;
  return { tokens, weights, mass };
}

function pick({ tokens, weights, mass }: Weighed, uniform: number): number {
  let rest = uniform * mass;
  let last = -1;
  for (const [i, weight] of weights.entries()) {
    if (weight === 0) continue;
    last = i;
    rest -= weight;
    if (rest < 0) break;
  }
  return tokens[last]; // rounding may leave a positive rest after the last token
}

/** In [0, 1), 53 bits. */
function uniform(seed: number, draw: number): number {
  const [high, low] = philox([...halves(draw), ...halves(STREAM)], halves(seed));
  return ((high >>> 5) * 2 ** 26 + (low >>> 6)) * 2 ** -53;
}

/** Distinct from the streams of parameters, which are 32-bit hashes of their names. */
const STREAM = 2 ** 32;

function halves(value: number): [number, number] {
  return [value >>> 0, Math.floor(value / 2 ** 32)];
}
