/** Element types of safetensors files, and the conversions that reading them into numbers needs. */
import { UsageError } from '../errors.js';

const DTYPE_BYTES = {
  F64: 8,
  I64: 8,
  U64: 8,
  F32: 4,
  I32: 4,
  U32: 4,
  BF16: 2,
  F16: 2,
  I16: 2,
  U16: 2,
  I8: 1,
  U8: 1,
  BOOL: 1,
} as const;

/** Element types of safetensors. */
export type SafeDtype = keyof typeof DTYPE_BYTES;

/** A tensor of a safetensors file. */
export interface SafeTensor {
  dtype: SafeDtype;
  shape: number[];
  /** Little-endian elements in row-major order, starting at any alignment. */
  data: Uint8Array;
}

export function isSafeDtype(name: unknown): name is SafeDtype {
  return typeof name === 'string' && Object.hasOwn(DTYPE_BYTES, name);
}

export function dtypeBytes(dtype: SafeDtype): number {
  return DTYPE_BYTES[dtype];
}

export function dtypeNames(): string[] {
  return Object.keys(DTYPE_BYTES);
}

/** Bytes of a tensor, or undefined when the shape is no shape or the product leaves the exact integers. */
export function tensorBytes(dtype: SafeDtype, shape: readonly unknown[]): number | undefined {
  let bytes = dtypeBytes(dtype);
  for (const extent of shape) {
    if (!Number.isSafeInteger(extent) || (extent as number) < 0) return undefined;
    bytes *= extent as number;
    if (!Number.isSafeInteger(bytes)) return undefined;
  }
  return bytes;
}

/** bfloat16 is the upper half of a float32: widening is exact. */
export function bf16ToFloat32(source: Uint16Array): Float32Array {
  const bits = new Uint32Array(source.length);
  for (let i = 0; i < source.length; i++) bits[i] = source[i] << 16;
  return new Float32Array(bits.buffer);
}

/** Rounds to nearest, ties to even; a NaN stays a (quiet) NaN instead of rounding up to infinity. */
export function float32ToBf16(source: Float32Array): Uint16Array {
  const bits = new Uint32Array(source.buffer, source.byteOffset, source.length);
  const result = new Uint16Array(source.length);
  for (let i = 0; i < source.length; i++) {
    const value = bits[i];
    const isNan = (value & 0x7fffffff) > 0x7f800000;
    result[i] = isNan ? (value >>> 16) | 0x40 : (value + 0x7fff + ((value >>> 16) & 1)) >>> 16;
  }
  return result;
}

function f16ToNumber(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction === 0 ? sign * Number.POSITIVE_INFINITY : Number.NaN;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** All elements as float64. Exact for every type but I64 and U64, which round beyond 2^53. */
export function toFloat64(tensor: SafeTensor): Float64Array {
  // A copy starts at alignment 0, which typed arrays demand. All machines Node runs CUDA or AVX on are little-endian.
  const { buffer } = new Uint8Array(tensor.data);
  switch (tensor.dtype) {
    case 'F64':
      return new Float64Array(buffer);
    case 'F32':
      return Float64Array.from(new Float32Array(buffer));
    case 'BF16':
      return Float64Array.from(bf16ToFloat32(new Uint16Array(buffer)));
    case 'F16':
      return Float64Array.from(new Uint16Array(buffer), f16ToNumber);
    case 'I64':
      return Float64Array.from(new BigInt64Array(buffer), Number);
    case 'U64':
      return Float64Array.from(new BigUint64Array(buffer), Number);
    case 'I32':
      return Float64Array.from(new Int32Array(buffer));
    case 'U32':
      return Float64Array.from(new Uint32Array(buffer));
    case 'I16':
      return Float64Array.from(new Int16Array(buffer));
    case 'U16':
      return Float64Array.from(new Uint16Array(buffer));
    case 'I8':
      return Float64Array.from(new Int8Array(buffer));
    case 'U8':
    case 'BOOL':
      return Float64Array.from(new Uint8Array(buffer));
    default:
      throw new UsageError(`dtype ${String(tensor.dtype satisfies never)} cannot be read as numbers`);
  }
}
