/** Log-probabilities of tokens from their logits. */
import type { PositionLogprobs, TokenLogprob } from './request.js';

/**
 * The log-probability of `token` and the `count` most probable tokens of the first `vocabulary`. The sum runs over all
 * logits, as the loss does, in float64.
 */
export function positionLogprobs(
  logits: Float32Array,
  token: number,
  count: number,
  vocabulary: number,
): PositionLogprobs {
  const normalizer = logSumExp(logits);
  const entry = (id: number): TokenLogprob => ({ token: id, logprob: logits[id] - normalizer });
  return { ...entry(token), top: largest(logits.subarray(0, vocabulary), count).map(entry) };
}

function logSumExp(logits: Float32Array): number {
  let most = Number.NEGATIVE_INFINITY;
  for (const logit of logits) if (logit > most) most = logit;
  let sum = 0;
  for (const logit of logits) sum += Math.exp(logit - most);
  return most + Math.log(sum);
}

/** Indices of the `count` largest logits, largest first, the lower index first among equals. */
function largest(logits: Float32Array, count: number): number[] {
  const best: number[] = [];
  if (count === 0) return best;
  for (let token = 0; token < logits.length; token++) {
    if (best.length === count && logits[token] <= logits[best[count - 1]]) continue;
    let at = best.length;
    while (at > 0 && logits[token] > logits[best[at - 1]]) at -= 1;
    best.splice(at, 0, token);
    if (best.length > count) best.pop();
  }
  return best;
}
