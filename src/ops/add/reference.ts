/** A sum in float64. Its gradient is the gradient of the result, for both sides. */

export function addForward(x: Float64Array, r: Float64Array): Float64Array {
  return x.map((value, i) => value + r[i]);
}

export function addBackward(dy: Float64Array) {
  return { dx: dy.slice(), dr: dy.slice() };
}
