/** The safetensors format: element types and their conversions, and the header of a file, checked before anything is read. */
import { UsageError } from '../errors.js';
import { isPlainObject } from '../json-values.js';
import { bfloat16ToFloat32 } from '../tensor/bfloat16.js';

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

/** Bytes of one element. */
export function dtypeBytes(dtype: SafeDtype): number {
  return DTYPE_BYTES[dtype];
}

export function dtypeNames(): string[] {
  return Object.keys(DTYPE_BYTES);
}

/** Bytes of a tensor, or undefined when the shape is no shape or the product leaves the exact integers. */
export function tensorBytes(dtype: SafeDtype, shape: readonly unknown[]): number | undefined {
  let bytes = DTYPE_BYTES[dtype];
  for (const extent of shape) {
    if (!Number.isSafeInteger(extent) || (extent as number) < 0) return undefined;
    bytes *= extent as number;
    if (!Number.isSafeInteger(bytes)) return undefined;
  }
  return bytes;
}

function f16ToNumber(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction === 0 ? sign * Number.POSITIVE_INFINITY : Number.NaN;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** F16 has only 65,536 values: a table converts faster than arithmetic. */
let f16Values: Float32Array | null = null;

/** Elements of F32, BF16 or F16 as float32, exactly; null for other types. */
export function toFloat32({ dtype, data }: Pick<SafeTensor, 'dtype' | 'data'>): Float32Array | null {
  // Typed arrays demand alignment; data may begin anywhere.
  const { buffer, byteOffset, byteLength } = data.byteOffset % 4 === 0 ? data : new Uint8Array(data);
  if (dtype === 'F32') return new Float32Array(buffer, byteOffset, byteLength / 4);
  if (dtype !== 'BF16' && dtype !== 'F16') return null;
  const bits = new Uint16Array(buffer, byteOffset, byteLength / 2);
  if (dtype === 'BF16') return bfloat16ToFloat32(bits);
  f16Values ??= Float32Array.from({ length: 1 << 16 }, (_, value) => f16ToNumber(value));
  const values = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) values[i] = f16Values[bits[i]];
  return values;
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
      return Float64Array.from(bfloat16ToFloat32(new Uint16Array(buffer)));
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

/** Ten times the header of the largest models; more takes seconds to read. The reference implementation has 100 MB. */
const MAX_HEADER_BYTES = 16_000_000;
/** Bytes of the little-endian uint64 in front of the header. */
export const PREFIX_BYTES = 8;
/** A header has three: all tensors, one of them, its shape. Parsing millions of levels takes seconds. */
const MAX_LEVELS = 16;
const METADATA_NAME = '__metadata__';

export interface TensorEntry {
  dtype: SafeDtype;
  shape: number[];
  /** Byte range inside the data section. */
  begin: number;
  end: number;
}

export interface SafetensorsHeader {
  metadata: Record<string, string>;
  entries: Map<string, TensorEntry>;
}

/** The length of the header, refused before anything of that size is allocated. */
export function checkHeaderLength(path: string, prefix: Uint8Array, fileBytes: number): number {
  if (prefix.length < PREFIX_BYTES) {
    throw refusal(path, `the file has ${prefix.length} bytes, too few for a header`);
  }
  const length = new DataView(prefix.buffer, prefix.byteOffset, PREFIX_BYTES).getBigUint64(0, true);
  if (length > BigInt(MAX_HEADER_BYTES)) {
    throw refusal(path, `the header claims ${length} bytes, over the limit of ${MAX_HEADER_BYTES}`);
  }
  if (Number(length) > fileBytes - PREFIX_BYTES) {
    throw refusal(path, `the header claims ${length} bytes, but the file has ${fileBytes}`);
  }
  return Number(length);
}

/** Parses and checks the header text against the bytes that really follow it. */
export function parseHeader(path: string, text: Uint8Array, dataBytes: number): SafetensorsHeader {
  const parsed = parseJson(path, text);
  if (!isPlainObject(parsed)) throw refusal(path, 'the header is not a JSON object');
  let metadata: Record<string, string> = {};
  const entries = new Map<string, TensorEntry>();
  for (const [name, value] of Object.entries(parsed)) {
    if (name === METADATA_NAME) metadata = checkMetadata(path, value);
    else entries.set(name, checkEntry(path, name, value, dataBytes));
  }
  checkCoverage(path, entries, dataBytes);
  return { metadata, entries };
}

/** The prefix and the header, padded with spaces so that the data begins at a multiple of 8. */
export function encodeHeader(entries: Map<string, TensorEntry>, metadata: Record<string, string>): Uint8Array {
  const fields: [string, unknown][] = Object.keys(metadata).length > 0 ? [[METADATA_NAME, metadata]] : [];
  for (const [name, { dtype, shape, begin, end }] of entries) {
    fields.push([name, { dtype, shape, data_offsets: [begin, end] }]);
  }
  // Built by hand because an object would move names that look like integers to the front.
  const json = `{${fields.map(([name, value]) => `${JSON.stringify(name)}:${JSON.stringify(value)}`).join(',')}}`;
  const text = new TextEncoder().encode(json);
  const length = Math.ceil(text.length / 8) * 8;
  const bytes = new Uint8Array(PREFIX_BYTES + length).fill(0x20);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(length), true);
  bytes.set(text, PREFIX_BYTES);
  return bytes;
}

/**
 * Lays tensors out one after the other, larger elements first, so that each starts at a multiple of its element size.
 * Among equal sizes the given order is kept: a model is then read from front to back.
 */
export function layOut(
  path: string,
  tensors: Iterable<{ name: string; dtype: SafeDtype; shape: readonly number[] }>,
): Map<string, TensorEntry> {
  const ordered = [...tensors].sort((a, b) => DTYPE_BYTES[b.dtype] - DTYPE_BYTES[a.dtype]);
  const entries = new Map<string, TensorEntry>();
  let begin = 0;
  for (const { name, dtype, shape } of ordered) {
    if (name === METADATA_NAME) throw new UsageError(`${path}: a tensor cannot be called ${METADATA_NAME}`);
    if (entries.has(name)) throw new UsageError(`${path}: two tensors are called ${quote(name)}`);
    const bytes = tensorBytes(dtype, shape);
    if (bytes === undefined) throw new UsageError(`${path}: tensor ${quote(name)} has the bad shape [${shape}]`);
    entries.set(name, { dtype, shape: [...shape], begin, end: begin + bytes });
    begin += bytes;
  }
  return entries;
}

/** A name as it may be printed: quoted, without control characters, of bounded length. */
export function quote(name: string): string {
  return JSON.stringify(name.length > 80 ? `${name.slice(0, 80)}…` : name);
}

function refusal(path: string, reason: string, cause?: unknown): UsageError {
  return new UsageError(`${path}: not a valid safetensors file: ${reason}; use another copy of the file`, { cause });
}

function parseJson(path: string, text: Uint8Array): unknown {
  if (!isShallowText(text)) throw refusal(path, `the header has more than ${MAX_LEVELS} levels`);
  let json: string;
  let parsed: unknown;
  try {
    json = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(text);
    parsed = JSON.parse(json);
  } catch (error) {
    throw refusal(path, 'the header is not JSON', error);
  }
  const duplicate = findDuplicateKey(json);
  if (duplicate !== undefined) throw refusal(path, `the name ${quote(duplicate)} appears twice in the header`);
  return parsed;
}

const [QUOTE, BACKSLASH] = ['"', '\\'].map((character) => character.charCodeAt(0));
const [OPENS, CLOSES] = ['{[', '}]'].map((both) => [...both].map((character) => character.charCodeAt(0)));

/** Whether JSON text, which need not be valid, has at most `MAX_LEVELS` levels. */
function isShallowText(text: Uint8Array): boolean {
  let depth = 0;
  let isInString = false;
  for (let i = 0; i < text.length; i++) {
    const byte = text[i];
    if (byte === QUOTE) isInString = !isInString;
    else if (isInString) i += Number(byte === BACKSLASH);
    else if (byte === OPENS[0] || byte === OPENS[1]) depth += 1;
    else if (byte === CLOSES[0] || byte === CLOSES[1]) depth -= 1;
    if (depth > MAX_LEVELS) return false;
  }
  return true;
}

/** The first key that appears twice in one object of valid JSON text: JSON.parse silently keeps the last one. */
function findDuplicateKey(json: string): string | undefined {
  const open: (Set<string> | undefined)[] = [];
  for (let i = 0; i < json.length; i++) {
    const character = json[i];
    if (character === '{') open.push(new Set());
    else if (character === '[') open.push(undefined);
    else if (character === '}' || character === ']') open.pop();
    else if (character === '"') {
      const start = i++;
      while (json[i] !== '"') i += json[i] === '\\' ? 2 : 1;
      const keys = open.at(-1);
      if (keys === undefined || !isFollowedByColon(json, i + 1)) continue;
      const key = JSON.parse(json.slice(start, i + 1)) as string;
      if (keys.has(key)) return key;
      keys.add(key);
    }
  }
  return undefined;
}

function isFollowedByColon(json: string, from: number): boolean {
  let i = from;
  while (json[i] === ' ' || json[i] === '\n' || json[i] === '\t' || json[i] === '\r') i++;
  return json[i] === ':';
}

function checkMetadata(path: string, value: unknown): Record<string, string> {
  if (!isPlainObject(value)) throw refusal(path, 'its metadata is not an object');
  for (const [name, text] of Object.entries(value)) {
    if (typeof text !== 'string') throw refusal(path, `the metadata ${quote(name)} is not a string`);
  }
  return value as Record<string, string>;
}

function checkEntry(path: string, name: string, value: unknown, dataBytes: number): TensorEntry {
  const tensor = `tensor ${quote(name)}`;
  if (!isPlainObject(value)) throw refusal(path, `${tensor} is not described by an object`);
  const { dtype, shape, data_offsets: offsets } = value;
  if (!isSafeDtype(dtype)) {
    const found = typeof dtype === 'string' ? quote(dtype) : 'no dtype';
    throw refusal(path, `${tensor} has ${found}; known are ${dtypeNames().join(' ')}`);
  }
  if (!Array.isArray(shape)) throw refusal(path, `${tensor} has no shape`);
  const bytes = tensorBytes(dtype, shape);
  if (bytes === undefined) throw refusal(path, `${tensor} has a shape that is not one of countable size`);
  if (!Array.isArray(offsets) || offsets.length !== 2 || !offsets.every(Number.isSafeInteger)) {
    throw refusal(path, `${tensor} has no pair of integer offsets`);
  }
  const [begin, end] = offsets as [number, number];
  if (begin < 0 || begin > end || end > dataBytes) {
    throw refusal(path, `${tensor} lies at ${begin} to ${end}, outside the ${dataBytes} bytes of data`);
  }
  if (end - begin !== bytes) {
    throw refusal(path, `${tensor} has ${end - begin} bytes where its shape needs ${bytes}`);
  }
  return { dtype, shape: shape as number[], begin, end };
}

/** The tensors must fill the data section exactly: an overlap or a hole could hide something. */
function checkCoverage(path: string, entries: Map<string, TensorEntry>, dataBytes: number): void {
  const ordered = [...entries].sort(([, a], [, b]) => a.begin - b.begin || a.end - b.end);
  let covered = 0;
  for (const [name, { begin, end }] of ordered) {
    if (begin < covered) throw refusal(path, `tensor ${quote(name)} overlaps the one before it`);
    if (begin > covered) throw refusal(path, `there is a hole in front of tensor ${quote(name)}`);
    covered = end;
  }
  if (covered !== dataBytes) throw refusal(path, `${dataBytes - covered} bytes of data belong to no tensor`);
}
