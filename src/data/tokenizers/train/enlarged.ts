/** Copies the numbers of an array into a larger one, which it returns. */
export function enlarged<Numbers extends Uint16Array | Int32Array | Float64Array>(
  larger: Numbers,
  from: Numbers,
): Numbers {
  larger.set(from as never);
  return larger;
}
