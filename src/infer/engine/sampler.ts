/**
 * From logits to the next token: biases, repetition, frequency and presence penalty, temperature, top-k, top-p (of the mass
 * that top-k left), min-p, then a draw. docs/explain/decoding.md gives the formulas.
 *
 * Draw i is a function of (seed, i) alone (Philox, as for weights): the same seed gives the same tokens on every
 * machine that computes the same logits, whatever was drawn before.
 */
import { ExitCode, TrefoilError, UsageError } from '../../errors.js';
import { philox } from '../../tensor/random/reference.js';

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
  /** For tokens of the context: positive logits are divided by it, others multiplied. 0.001 to 1000; 1 = none, the default. */
  readonly repetitionPenalty?: number;
  /** Subtracted from the logit of a token for each time that it was generated. -2 to 2; 0 = none, the default. */
  readonly frequencyPenalty?: number;
  /** Subtracted from the logits of tokens that were generated. -2 to 2; 0 = none, the default. */
  readonly presencePenalty?: number;
  /**
   * Added to the logits of tokens, by token id. -100 to 100; -100 bans a token, unless all that may be drawn are banned.
   * Default: none.
   */
  readonly logitBias?: Readonly<Record<string, number>>;
  /** Seed of the draws, an integer from 0 below 2^53. Default 0. */
  readonly seed?: number;
}

/**
 * The index of the token chosen for draw number `draw`. For the penalties: `seen` are the tokens of the context, `counts` how
 * often each token was generated.
 */
export type Sampler = (
  logits: Float32Array,
  draw: number,
  seen?: Iterable<number>,
  counts?: ReadonlyMap<number, number>,
) => number;

/** Bounds of the repetition penalty: beyond them finite logits would become infinite. */
export const MIN_PENALTY = 0.001;
export const MAX_PENALTY = 1000;
/** Bounds of the frequency and the presence penalty, and of biases: those of the OpenAI API. */
export const MAX_SHIFT = 2;
export const MAX_BIAS = 100;
const NO_BIAS = {};
const NO_COUNTS: ReadonlyMap<number, number> = new Map();

/** Logits that are NaN or infinite: training diverged, or the weights were damaged. */
export class UnusableLogits extends TrefoilError {
  constructor(reason: string) {
    super(`${reason}: the model's weights are not sound; use an earlier checkpoint`, ExitCode.nonFinite);
  }
}

function withDefaults(options: SamplingOptions): Required<SamplingOptions> {
  const { temperature = 1, topK = 0, topP = 1, minP = 0, repetitionPenalty = 1, seed = 0 } = options;
  const { frequencyPenalty = 0, presencePenalty = 0, logitBias: given = NO_BIAS } = options;
  const logitBias = Object.keys(given).length === 0 ? NO_BIAS : given; // compared by identity
  const penalties = { repetitionPenalty, frequencyPenalty, presencePenalty, logitBias };
  return { temperature, topK, topP, minP, ...penalties, seed };
}

export function createSampler(options: SamplingOptions = {}): Sampler {
  const checked = withDefaults(options);
  const { temperature, topK, topP, minP, repetitionPenalty, seed } = checked;
  if (!(Number.isFinite(temperature) && temperature >= 0))
    throw new UsageError(`temperature: ${temperature} is not allowed; a number from 0 (greedy)`);
  if (!(Number.isSafeInteger(topK) && topK >= 0))
    throw new UsageError(`top-k: ${topK} is not allowed; a whole number from 0 (all tokens)`);
  if (!(topP > 0 && topP <= 1))
    throw new UsageError(`top-p: ${topP} is not allowed; a number above 0, up to 1 (all tokens)`);
  if (!(minP >= 0 && minP <= 1))
    throw new UsageError(`min-p: ${minP} is not allowed; a number from 0 (all tokens) to 1`);
  if (!(repetitionPenalty >= MIN_PENALTY && repetitionPenalty <= MAX_PENALTY))
    throw new UsageError(
      `repetition-penalty: ${repetitionPenalty} is not allowed; a number from ${MIN_PENALTY} to ${MAX_PENALTY}, 1 for none`,
    );
  if (!(Number.isSafeInteger(seed) && seed >= 0))
    throw new UsageError(`seed: ${seed} is not allowed; a whole number from 0 below 2^53`);
  for (const name of ['frequencyPenalty', 'presencePenalty'] as const)
    if (!(Math.abs(checked[name]) <= MAX_SHIFT))
      throw new UsageError(
        `${name.replace('P', '-p')}: ${checked[name]} is not allowed; a number from -${MAX_SHIFT} to ${MAX_SHIFT}`,
      );
  const shift = createShift(checked);
  return (given, draw, seen = [], counts = NO_COUNTS) => {
    const logits = shift ? shift(given, seen, counts) : given;
    const best = mostProbable(logits);
    if (temperature === 0) return best;
    const weigh = (token: number) => Math.exp((logits[token] - logits[best]) / temperature);
    const all = weighed(topK === 0 || topK >= logits.length ? null : largest(logits, topK), logits.length, weigh);
    const kept = nearBest(topP === 1 ? all : nucleus(logits, all, topP), minP);
    return pick(kept, uniformOfDraw(seed, draw));
  };
}

/** Whether these options always choose the argmax of the unchanged logits. */
export function isArgmax(options: SamplingOptions = {}): boolean {
  return options.temperature === 0 && !shiftsLogits(withDefaults(options));
}

/** Whether logits are changed before the temperature. */
function shiftsLogits(options: Required<SamplingOptions>): boolean {
  const { repetitionPenalty, frequencyPenalty, presencePenalty, logitBias } = options;
  return repetitionPenalty !== 1 || frequencyPenalty !== 0 || presencePenalty !== 0 || logitBias !== NO_BIAS;
}

/** Draws of a GPU with the tokens of a sampler. */
export interface DeviceDraws {
  /** Whether every draw is the argmax, so that nothing is to be drawn. */
  readonly isArgmax: boolean;
  /** A row of settings for `sampleRows`. */
  settings(draw: number): readonly number[];
}

/**
 * Options that `sampleRows` obeys. It sees logits only: no context for penalties, and it knows no biases. With `false` the
 * logits are copied to the host, which draws: correct, and slower.
 */
const ON_DEVICE: Readonly<Record<keyof SamplingOptions, boolean>> = {
  temperature: true,
  topK: true,
  topP: true,
  minP: true,
  repetitionPenalty: false,
  frequencyPenalty: false,
  presencePenalty: false,
  logitBias: false,
  seed: true,
};

/** Null if another option is set: the host then draws (`Sequence.needsLogits`). */
export function deviceDraws(options: SamplingOptions = {}): DeviceDraws | null {
  const checked = withDefaults(options);
  const neutral = withDefaults({});
  const names = Object.keys(ON_DEVICE) as (keyof SamplingOptions)[];
  if (names.some((name) => !ON_DEVICE[name] && checked[name] !== neutral[name])) return null;
  const { temperature, topK, topP, minP, seed } = checked;
  return {
    isArgmax: isArgmax(options),
    // In the order of `SETTINGS` in src/ops/sample/op.ts.
    settings: (draw) => [temperature, topK, topP, minP, uniformOfDraw(seed, draw)],
  };
}

type Shift = (logits: Float32Array, seen: Iterable<number>, counts: ReadonlyMap<number, number>) => Float32Array;

/** Biases and penalties, on a copy; null if there are none. Sums are in float64 and rounded once for each token and rule. */
function createShift(options: Required<SamplingOptions>): Shift | null {
  if (!shiftsLogits(options)) return null;
  const { repetitionPenalty, frequencyPenalty, presencePenalty } = options;
  const biases = biasesOf(options.logitBias);
  return (given, seen, counts) => {
    const result = given.slice();
    for (const [token, bias] of biases) result[token] += bias;
    // A ban must not leave a request without a token, such as one whose form allows banned tokens only.
    if (
      biases.some(([, bias]) => bias === Number.NEGATIVE_INFINITY) &&
      result.every((x) => x === Number.NEGATIVE_INFINITY)
    )
      for (const [token, bias] of biases) result[token] = given[token] + Math.max(bias, -MAX_BIAS);
    if (repetitionPenalty !== 1)
      for (const token of new Set(seen)) {
        const logit = result[token];
        result[token] = logit > 0 ? logit / repetitionPenalty : logit * repetitionPenalty;
      }
    for (const [token, count] of counts) result[token] -= frequencyPenalty * count + presencePenalty;
    return result;
  };
}

function biasesOf(logitBias: Readonly<Record<string, number>>): (readonly [token: number, bias: number])[] {
  return Object.entries(logitBias).map(([name, bias]) => {
    const token = Number(name);
    if (!/^\d{1,9}$/.test(name))
      throw new UsageError(`logit-bias: ${JSON.stringify(name.slice(0, 40))} is not a token id`);
    if (!(typeof bias === 'number' && Math.abs(bias) <= MAX_BIAS))
      throw new UsageError(
        `logit-bias: ${bias} is not allowed; a number from -${MAX_BIAS} to ${MAX_BIAS}, -${MAX_BIAS} to ban`,
      );
    return [token, bias === -MAX_BIAS ? Number.NEGATIVE_INFINITY : bias];
  });
}

/** `minP` is relative to the most probable token, whose weight is 1. */
function nearBest(kept: Weighed, minP: number): Weighed {
  return minP === 0 ? kept : only(kept, (weight) => weight >= minP);
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

/** The `k` tokens of the largest logits, the lower index first among equals, in ascending order. */
function largest(logits: Float32Array, k: number): Int32Array {
  const limit = kthLargest(logits, k);
  let atLimit = k;
  for (let token = 0; token < logits.length; token++) if (logits[token] > limit) atLimit -= 1;
  const kept = new Int32Array(k);
  let count = 0;
  for (let token = 0; token < logits.length && count < k; token++) {
    if (logits[token] < limit || (logits[token] === limit && atLimit-- <= 0)) continue;
    kept[count++] = token;
  }
  return kept;
}

/** By a heap of the k largest so far, the smallest of them at the root: few numbers of a long list enter it. */
function kthLargest(numbers: Float32Array, k: number): number {
  const heap = numbers.slice(0, k).sort(); // ascending, so a heap
  for (let i = k; i < numbers.length; i++) {
    if (!(numbers[i] > heap[0])) continue;
    let at = 0;
    for (let child = 1; child < k; child = 2 * at + 1) {
      if (child + 1 < k && heap[child + 1] < heap[child]) child += 1;
      if (heap[child] >= numbers[i]) break;
      heap[at] = heap[child];
      at = child;
    }
    heap[at] = numbers[i];
  }
  return heap[0];
}

/**
 * Tokens and their weights relative to the most probable token, whose weight is 1. Top-k, top-p and min-p all keep it. A token's
 * probability among these tokens is its weight / mass. Typed arrays, since a vocabulary has 100,000 tokens and more.
 */
interface Weighed {
  /** Null: token i is at place i. */
  readonly tokens: Int32Array | null;
  readonly weights: Float64Array;
  /** Sum of the weights of the tokens that the rules before have kept (top-k, then top-p, then min-p). */
  readonly mass: number;
}

/** `count` is the number of tokens if `tokens` is null. */
function weighed(tokens: Int32Array | null, count: number, weigh: (token: number) => number): Weighed {
  const weights = new Float64Array(tokens?.length ?? count);
  for (let i = 0; i < weights.length; i++) weights[i] = weigh(tokens ? tokens[i] : i);
  return { tokens, weights, mass: sum(weights) };
}

/** The tokens whose weight is wanted, in their order. */
function only({ tokens, weights }: Weighed, isWanted: (weight: number) => boolean): Weighed {
  const kept = new Int32Array(weights.length);
  const keptWeights = new Float64Array(weights.length);
  let count = 0;
  for (let i = 0; i < weights.length; i++) {
    if (!isWanted(weights[i])) continue;
    kept[count] = tokens ? tokens[i] : i;
    keptWeights[count] = weights[i];
    count += 1;
  }
  const wanted = keptWeights.subarray(0, count);
  return { tokens: kept.subarray(0, count), weights: wanted, mass: sum(wanted) };
}

/** The most probable tokens that together reach the share `p`, the most probable first. */
function nucleus(logits: Float32Array, all: Weighed, p: number): Weighed {
  const target = p * all.mass;
  // A few of the most probable tokens are enough as a rule, and few are sorted fast. The margin is more than rounding.
  let candidates = only(all, (weight) => weight >= FIRST_CUT);
  for (let cut = FIRST_CUT / 16; candidates.mass < target * (1 + 1e-9); cut /= 16) {
    // All tokens below (1 - p) / count together have less than 1 - p: they are never needed.
    const least = ((1 - p) * all.mass) / all.weights.length;
    candidates = only(all, (weight) => weight >= Math.max(cut, least));
    if (cut <= least) break;
  }
  const { tokens, weights } = candidates;
  const order = descending(weights.length, (i) => logits[tokens?.[i] ?? i]);
  let count = 0;
  for (let reached = 0; count < order.length && reached < target; count++) reached += weights[order[count]];
  const first = order.subarray(0, count);
  const kept = Float64Array.from(first, (i) => weights[i]);
  return { tokens: Int32Array.from(first, (i) => tokens?.[i] ?? i), weights: kept, mass: sum(kept) };
}

/** Weight of the tokens that are tried first; that of the most probable one is 1. */
const FIRST_CUT = 1 / 64;
const PLACES = 2 ** 21;

/** The places 0 … count - 1 by falling logit, the lower place first among equals. Logits: weights may round to equals. */
function descending(count: number, logitAt: (place: number) => number): Int32Array {
  if (count > PLACES) throw new Error(`${count} tokens are more than can be sorted`);
  const float = new Float32Array(1);
  const bits = new Int32Array(float.buffer);
  // One number for the logit, in whose bits integers have the order of floats, and for the place: typed arrays of
  // numbers are sorted without a callback.
  const keys = new Float64Array(count);
  for (let place = 0; place < count; place++) {
    float[0] = logitAt(place) + 0; // -0 becomes 0
    const ordered = bits[0] < 0 ? bits[0] ^ 0x7fff_ffff : bits[0];
    keys[place] = -ordered * PLACES + place;
  }
  return Int32Array.from(keys.sort(), (key) => ((key % PLACES) + PLACES) % PLACES);
}

function sum(weights: Float64Array): number {
  let total = 0;
  for (let i = 0; i < weights.length; i++) total += weights[i];
  return total;
}

function pick({ tokens, weights, mass }: Weighed, uniform: number): number {
  let rest = uniform * mass;
  let last = -1;
  for (let i = 0; i < weights.length; i++) {
    if (weights[i] === 0) continue;
    last = i;
    rest -= weights[i];
    if (rest < 0) break;
  }
  return tokens ? tokens[last] : last; // rounding may leave a positive rest after the last token
}

/** The number in [0, 1) that decides draw number `draw` of a seed, of 53 bits. */
export function uniformOfDraw(seed: number, draw: number): number {
  const [high, low] = philox([...halves(draw), ...halves(STREAM)], halves(seed));
  return ((high >>> 5) * 2 ** 26 + (low >>> 6)) * 2 ** -53;
}

/** Distinct from the streams of parameters, which are 32-bit hashes of their names. */
const STREAM = 2 ** 32;

function halves(value: number): [number, number] {
  return [value >>> 0, Math.floor(value / 2 ** 32)];
}
