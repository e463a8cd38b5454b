/** The norm of a list of vectors, and of each of them. */

export function gradientNormReference(gradients: readonly Float64Array[]) {
  const squares = gradients.map((gradient) => gradient.reduce((sum, value) => sum + value * value, 0));
  return { norm: Math.sqrt(squares.reduce((sum, value) => sum + value, 0)), each: squares.map(Math.sqrt) };
}
