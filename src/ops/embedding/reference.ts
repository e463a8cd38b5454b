/** Embedding in float64: a row of the table for every id; the gradient of a row is the sum over its tokens. */

export function embeddingForward(table: Float64Array, ids: ArrayLike<number>, dim: number): Float64Array {
  const y = new Float64Array(ids.length * dim);
  for (let t = 0; t < ids.length; t++) y.set(table.subarray(ids[t] * dim, (ids[t] + 1) * dim), t * dim);
  return y;
}

export function embeddingBackward(ids: ArrayLike<number>, dy: Float64Array, vocab: number, dim: number): Float64Array {
  const dTable = new Float64Array(vocab * dim);
  for (let t = 0; t < ids.length; t++) for (let i = 0; i < dim; i++) dTable[ids[t] * dim + i] += dy[t * dim + i];
  return dTable;
}
