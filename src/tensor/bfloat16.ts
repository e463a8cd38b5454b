/** bfloat16 on the host: the upper half of a float32, rounded to nearest even. NaN stays NaN. */

export function float32ToBfloat16(values: ArrayLike<number>): Uint16Array {
  const floats = values instanceof Float32Array ? values : Float32Array.from(values);
  const bits = new Uint32Array(floats.buffer, floats.byteOffset, floats.length);
  const out = new Uint16Array(floats.length);
  for (let i = 0; i < out.length; i++) {
    const b = bits[i];
    const isNan = (b & 0x7fffffff) > 0x7f800000;
    out[i] = isNan ? (b >>> 16) | 0x40 : (b + 0x7fff + ((b >>> 16) & 1)) >>> 16;
  }
  return out;
}

export function bfloat16ToFloat32(halves: Uint16Array): Float32Array {
  const bits = new Uint32Array(halves.length);
  for (let i = 0; i < bits.length; i++) bits[i] = halves[i] << 16;
  return new Float32Array(bits.buffer);
}
