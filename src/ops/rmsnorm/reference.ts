/** RMSNorm in float64: y = x / sqrt(mean(x²) + epsilon) * weight, row by row. */

export function rmsnormForward(x: Float64Array, weight: Float64Array, epsilon: number): Float64Array {
  const dim = weight.length;
  const y = new Float64Array(x.length);
  for (let row = 0; row < x.length; row += dim) {
    const scale = inverseRms(x, row, dim, epsilon);
    for (let i = 0; i < dim; i++) y[row + i] = x[row + i] * scale * weight[i];
  }
  return y;
}

export function rmsnormBackward(x: Float64Array, weight: Float64Array, epsilon: number, dy: Float64Array) {
  const dim = weight.length;
  const dx = new Float64Array(x.length);
  const dWeight = new Float64Array(dim);
  for (let row = 0; row < x.length; row += dim) {
    const scale = inverseRms(x, row, dim, epsilon);
    let inner = 0;
    for (let i = 0; i < dim; i++) {
      inner += dy[row + i] * weight[i] * x[row + i];
      dWeight[i] += dy[row + i] * x[row + i] * scale;
    }
    for (let i = 0; i < dim; i++)
      dx[row + i] = dy[row + i] * weight[i] * scale - (x[row + i] * inner * scale ** 3) / dim;
  }
  return { dx, dWeight };
}

function inverseRms(x: Float64Array, row: number, dim: number, epsilon: number): number {
  let squares = 0;
  for (let i = 0; i < dim; i++) squares += x[row + i] ** 2;
  return 1 / Math.sqrt(squares / dim + epsilon);
}
