/** The branch gate in float64, and the statistics that detect a collapse. */

export interface GateShape {
  readonly kind: 'softmax' | 'sigmoid';
  readonly temperature: number;
}

/** Statistics of gates. */
export interface GateStatistics {
  /** Natural logarithm: ln 3 = 1.0986 for equal shares, 0 for one branch alone. */
  readonly entropyMean: number;
  readonly entropyMin: number;
  /** The largest of the three shares. */
  readonly maxMean: number;
  readonly max: number;
  /** Part of the (token, head) pairs with entropy < 0.1 and a share > 0.95. */
  readonly collapseFraction: number;
  /** Mean share of cmp, sel, win. */
  readonly shares: readonly [number, number, number];
}

/** `logits` [rows, 3] -> gates [rows, 3]. */
export function gateForward(logits: Float64Array, { kind, temperature }: GateShape): Float64Array {
  const x = logits.map((value) => value / temperature);
  if (kind === 'sigmoid') return x.map((value) => 1 / (1 + Math.exp(-value)));
  for (let row = 0; row < x.length; row += 3) {
    const most = Math.max(x[row], x[row + 1], x[row + 2]);
    const exponentials = [0, 1, 2].map((b) => Math.exp(x[row + b] - most));
    const total = exponentials[0] + exponentials[1] + exponentials[2];
    for (let b = 0; b < 3; b++) x[row + b] = exponentials[b] / total;
  }
  return x;
}

export function gateBackward(logits: Float64Array, shape: GateShape, dGates: Float64Array): Float64Array {
  const gates = gateForward(logits, shape);
  const dLogits = new Float64Array(logits.length);
  for (let row = 0; row < logits.length; row += 3) {
    const mean = [0, 1, 2].reduce((total, b) => total + gates[row + b] * dGates[row + b], 0);
    for (let i = row; i < row + 3; i++)
      dLogits[i] =
        shape.kind === 'softmax'
          ? (gates[i] * (dGates[i] - mean)) / shape.temperature
          : (gates[i] * (1 - gates[i]) * dGates[i]) / shape.temperature;
  }
  return dLogits;
}

/** Over the rows [rows, 3] of all layers. Shares are gates divided by their sum; three zero gates count as equal. */
export function gateStatisticsReference(gates: readonly Float64Array[]): GateStatistics {
  const rows = gates.flatMap((layer) =>
    Array.from({ length: layer.length / 3 }, (_, r) => layer.slice(r * 3, r * 3 + 3)),
  );
  const shares = rows.map((row) => {
    const total = row[0] + row[1] + row[2];
    return row.map((gate) => (total > 0 ? gate / total : 1 / 3));
  });
  const entropies = shares.map((row) => row.reduce((sum, p) => (p > 0 ? sum - p * Math.log(p) : sum), 0));
  const largest = shares.map((row) => Math.max(...row));
  const mean = (values: number[]) => values.reduce((a, b) => a + b, 0) / rows.length;
  return {
    entropyMean: mean(entropies),
    entropyMin: Math.min(...entropies),
    maxMean: mean(largest),
    max: Math.max(...largest),
    collapseFraction: mean(entropies.map((entropy, i) => Number(entropy < 0.1 && largest[i] > 0.95))),
    shares: [mean(shares.map((row) => row[0])), mean(shares.map((row) => row[1])), mean(shares.map((row) => row[2]))],
  };
}
