/** Products, scaling, exponential and logarithm in float64, number by number. */

/** `b` has one number for every `a.length / b.length` successive numbers of `a`. */
export function mulForward(a: Float64Array, b: Float64Array): Float64Array {
  return a.map((value, i) => value * b[Math.floor((i * b.length) / a.length)]);
}

export function mulBackward(
  a: Float64Array,
  b: Float64Array,
  dy: Float64Array,
): { da: Float64Array; db: Float64Array } {
  const db = new Float64Array(b.length);
  dy.forEach((slope, i) => {
    db[Math.floor((i * b.length) / a.length)] += slope * a[i];
  });
  return { da: mulForward(dy, b), db };
}

export const scaleForward = (x: Float64Array, factor: number) => x.map((value) => value * factor);
export const scaleBackward = scaleForward;

export const expForward = (x: Float64Array) => x.map(Math.exp);
export const expBackward = (x: Float64Array, dy: Float64Array) => x.map((value, i) => dy[i] * Math.exp(value));

export const logForward = (x: Float64Array) => x.map(Math.log);
export const logBackward = (x: Float64Array, dy: Float64Array) => x.map((value, i) => dy[i] / value);
