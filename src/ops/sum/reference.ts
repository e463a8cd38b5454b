/** Sums of rows in float64, times a factor. */

export function sumForward(x: Float64Array, width: number, factor = 1): Float64Array {
  const sums = new Float64Array(x.length / width);
  x.forEach((value, i) => {
    sums[Math.floor(i / width)] += factor * value;
  });
  return sums;
}

export function sumBackward(count: number, width: number, dy: Float64Array, factor = 1): Float64Array {
  return Float64Array.from({ length: count }, (_, i) => factor * dy[Math.floor(i / width)]);
}
