/** SiLU and SwiGLU in float64. */

const sigmoid = (x: number) => 1 / (1 + Math.exp(-x));
const siluOf = (x: number) => x * sigmoid(x);
const siluSlope = (x: number) => sigmoid(x) * (1 + x * (1 - sigmoid(x)));

export function siluForward(x: Float64Array): Float64Array {
  return x.map(siluOf);
}

export function siluBackward(x: Float64Array, dy: Float64Array): Float64Array {
  return x.map((value, i) => dy[i] * siluSlope(value));
}

/** `x` holds rows of 2 * hidden numbers: gate, then up. */
export function swigluForward(x: Float64Array, hidden: number): Float64Array {
  return new Float64Array(x.length / 2).map((_, i) => {
    const { gate, up } = pair(x, hidden, i);
    return siluOf(gate) * up;
  });
}

export function swigluBackward(x: Float64Array, hidden: number, dy: Float64Array): Float64Array {
  const dx = new Float64Array(x.length);
  dy.forEach((slope, i) => {
    const { at, gate, up } = pair(x, hidden, i);
    dx[at] = slope * up * siluSlope(gate);
    dx[at + hidden] = slope * siluOf(gate);
  });
  return dx;
}

function pair(x: Float64Array, hidden: number, i: number) {
  const at = Math.floor(i / hidden) * 2 * hidden + (i % hidden);
  return { at, gate: x[at], up: x[at + hidden] };
}
