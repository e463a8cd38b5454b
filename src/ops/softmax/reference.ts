/** Softmax of rows in float64. */

export function softmaxForward(x: Float64Array, width: number): Float64Array {
  return byRow(x, width, (row) => {
    const top = Math.max(...row);
    const powers = row.map((value) => Math.exp(value - top));
    const total = powers.reduce((sum, value) => sum + value, 0);
    return powers.map((value) => value / total);
  });
}

/** `y` is the result of the forward pass. */
export function softmaxBackward(y: Float64Array, width: number, dy: Float64Array): Float64Array {
  return byRow(y, width, (row, at) => {
    const inner = row.reduce((sum, value, i) => sum + value * dy[at + i], 0);
    return row.map((value, i) => value * (dy[at + i] - inner));
  });
}

function byRow(x: Float64Array, width: number, of: (row: Float64Array, at: number) => Float64Array): Float64Array {
  const out = new Float64Array(x.length);
  for (let at = 0; at < x.length; at += width) out.set(of(x.slice(at, at + width), at), at);
  return out;
}
