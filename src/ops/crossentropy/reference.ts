/** Cross entropy in float64: loss = log(sum(exp(logits))) - logits[target], mean over the targets that are not -100. */

export function crossEntropyForward(logits: Float64Array, targets: ArrayLike<number>, vocab: number) {
  const losses = Float64Array.from(targets, (target, t) =>
    target === -100 ? 0 : logSumExp(rowOf(logits, vocab, t)) - logits[t * vocab + target],
  );
  const count = counted(targets);
  return { losses, loss: count === 0 ? 0 : losses.reduce((sum, loss) => sum + loss, 0) / count };
}

export function crossEntropyBackward(
  logits: Float64Array,
  targets: ArrayLike<number>,
  vocab: number,
  dLoss: number,
): Float64Array {
  const count = counted(targets);
  const dLogits = new Float64Array(logits.length);
  for (let t = 0; t < targets.length; t++) {
    if (targets[t] === -100) continue;
    const row = rowOf(logits, vocab, t);
    const lse = logSumExp(row);
    row.forEach((logit, v) => {
      dLogits[t * vocab + v] = ((Math.exp(logit - lse) - Number(v === targets[t])) / count) * dLoss;
    });
  }
  return dLogits;
}

function rowOf(logits: Float64Array, vocab: number, t: number): Float64Array {
  return logits.subarray(t * vocab, (t + 1) * vocab);
}

function logSumExp(row: Float64Array): number {
  const top = row.reduce((most, logit) => Math.max(most, logit), Number.NEGATIVE_INFINITY);
  return top + Math.log(row.reduce((sum, logit) => sum + Math.exp(logit - top), 0));
}

function counted(targets: ArrayLike<number>): number {
  return Array.from(targets).filter((target) => target !== -100).length;
}
