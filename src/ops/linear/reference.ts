/** y = x wᵀ in float64, and its two gradients: dx = dy w, dw = dyᵀ x. Matrices are row-major; w is [out, in]. */

export function linearForward(
  x: Float64Array,
  w: Float64Array,
  rows: number,
  outputs: number,
  inputs: number,
): Float64Array {
  const y = new Float64Array(rows * outputs);
  for (let m = 0; m < rows; m++)
    for (let n = 0; n < outputs; n++) {
      let total = 0;
      for (let k = 0; k < inputs; k++) total += x[m * inputs + k] * w[n * inputs + k];
      y[m * outputs + n] = total;
    }
  return y;
}

export function linearBackward(
  x: Float64Array,
  w: Float64Array,
  dy: Float64Array,
  rows: number,
  outputs: number,
  inputs: number,
) {
  const dx = new Float64Array(rows * inputs);
  const dw = new Float64Array(outputs * inputs);
  for (let m = 0; m < rows; m++)
    for (let n = 0; n < outputs; n++) {
      const g = dy[m * outputs + n];
      for (let k = 0; k < inputs; k++) {
        dx[m * inputs + k] += g * w[n * inputs + k];
        dw[n * inputs + k] += g * x[m * inputs + k];
      }
    }
  return { dx, dw };
}
