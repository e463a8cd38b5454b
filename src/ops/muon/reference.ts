/** One step of Muon in float64 (docs/reference/training.md has the formulas). */

/** The quintic of the Newton-Schulz iteration: a x + b x³ + c x⁵, from "Muon" (Jordan et al., 2024). */
export const QUINTIC = [3.4445, -4.775, 2.0315] as const;
/** Iterations after which singular values from about 0.01 to 1 lie between 0.7 and 1.2. */
export const ITERATIONS = 5;
/** Added to the Frobenius norm: a gradient of zeros gives an update of zeros. */
export const NORM_EPSILON = 1e-7;
/** Root mean square of an update at learning rate 1, as AdamW has it on average (Liu et al., 2025). */
const UPDATE_RMS = 0.2;

/** Factor on an orthogonalised matrix so that its update has the root mean square of AdamW's. */
export function updateScale(rows: number, columns: number): number {
  return UPDATE_RMS * Math.sqrt(Math.max(rows, columns));
}

/** About U Vᵀ of the singular value decomposition x = U S Vᵀ; `x` is [rows, columns]. */
export function orthogonalizeReference(x: Float64Array, rows: number, columns: number): Float64Array {
  const norm = Math.sqrt(x.reduce((sum, value) => sum + value * value, 0));
  let current = x.map((value) => value / (norm + NORM_EPSILON));
  const [a, b, c] = QUINTIC;
  for (let i = 0; i < ITERATIONS; i++) {
    const gram = product(current, transpose(current, rows, columns), rows, columns, rows);
    const square = product(gram, gram, rows, rows, rows);
    const polynomial = gram.map((value, at) => b * value + c * square[at]);
    const rest = product(polynomial, current, rows, rows, columns);
    current = current.map((value, at) => a * value + rest[at]);
  }
  return current;
}

export interface MuonReferenceSettings {
  readonly learningRate: number;
  readonly momentum: number;
  readonly weightDecay: number;
  readonly gradientScale: number;
}

/** Changes `value` and `average`, the momentum; both, and the gradient, are [rows, columns]. */
export function muonStep(
  value: Float64Array,
  gradient: Float64Array,
  average: Float64Array,
  rows: number,
  columns: number,
  { learningRate, momentum, weightDecay, gradientScale }: MuonReferenceSettings,
): void {
  const direction = value.map((_, i) => {
    const g = gradient[i] * gradientScale;
    average[i] = momentum * average[i] + (1 - momentum) * g;
    return momentum * average[i] + (1 - momentum) * g;
  });
  const scale = updateScale(rows, columns);
  orthogonalizeReference(direction, rows, columns).forEach((update, i) => {
    value[i] -= learningRate * (scale * update + weightDecay * value[i]);
  });
}

function transpose(x: Float64Array, rows: number, columns: number): Float64Array {
  return x.map((_, at) => x[(at % rows) * columns + Math.floor(at / rows)]);
}

/** [m, k] by [k, n] */
function product(x: Float64Array, y: Float64Array, m: number, k: number, n: number): Float64Array {
  const out = new Float64Array(m * n);
  for (let i = 0; i < m; i++)
    for (let p = 0; p < k; p++) for (let j = 0; j < n; j++) out[i * n + j] += x[i * k + p] * y[p * n + j];
  return out;
}
