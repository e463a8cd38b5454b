/** A tensor: device memory with a shape and a dtype. Row-major, always contiguous. */

import { type Device, expectDevice, type MemoryBlock } from '../device/device.js';
import type { MemoryPool } from '../device/pool.js';
import { UsageError } from '../errors.js';
import { bfloat16ToFloat32, float32ToBfloat16 } from './bfloat16.js';
import { dispose } from './dispose.js';

/** Element type of a tensor. */
export type Dtype = 'f32' | 'bf16' | 'i32' | 'f64';

/** The memory of a tensor holds numbers, or 64-bit addresses of memory of its device. */
type MemoryDtype = Dtype | 'address';

/**
 * One value of a tensor.
 *
 * @opaque
 */
type Element<D extends MemoryDtype> = D extends 'address' ? bigint : number;

/** Extents of a tensor, outermost first. `[]` is a scalar. */
export type Shape = readonly number[];

/** The typed array that `Tensor.read` returns for each dtype; bf16 is widened. */
export interface HostArrays {
  readonly address: BigUint64Array;
  readonly f32: Float32Array;
  readonly bf16: Float32Array;
  readonly i32: Int32Array;
  readonly f64: Float64Array;
}

/** Bytes of one element. */
export const DTYPE_BYTES: Record<MemoryDtype, number> = { f32: 4, bf16: 2, i32: 4, f64: 8, address: 8 };

/**
 * Device memory that a tensor shares with its views. Gradients belong to the storage, so a reshape needs no backward
 * rule.
 *
 * @opaque
 */
export class Storage {
  readonly device: Device;
  /** Requested size; the block behind it may be larger. */
  readonly bytes: number;
  /** Null for a part of another storage. */
  readonly #pool: MemoryPool | null;
  readonly #block: MemoryBlock;
  readonly #whole: Storage | null;
  #freedBy: string | null = null;
  /** Set on the storage of a parameter: where its gradient accumulates. */
  leaf: GradientSlot | null = null;
  /** Name of the parameter that owns the storage, for error messages. */
  name: string | null = null;

  /** Allocates from the device's pool, or refers to the part of `whole` at byte `offset`. */
  constructor(device: Device, bytes: number, whole: Storage | null = null, offset = 0) {
    this.device = device;
    this.bytes = bytes;
    this.#whole = whole;
    this.#pool = whole ? null : device.pool; // the device may use another pool by the time this is freed
    this.#block = this.#pool?.take(bytes) ?? { address: whole!.address + BigInt(offset), bytes };
  }

  /** Address on the device; throws after `free`. */
  get address(): bigint {
    return this.#block.address;
  }

  /** Names what freed the memory; null while it is allocated. */
  get freedBy(): string | null {
    return this.#freedBy ?? this.#whole?.freedBy ?? null;
  }

  /** Whether the memory was given back. */
  get isFreed(): boolean {
    return this.freedBy !== null;
  }

  /** Returns the memory to the pool. A part frees nothing: its memory goes with the whole. */
  free(by = 'free()', tensor: Tensor<MemoryDtype> | null = null): void {
    if (this.#freedBy !== null)
      throw new Error(`${tensor ?? 'a tensor'} was freed twice: by ${this.#freedBy}, then by ${by}`);
    this.#freedBy = by;
    this.#pool?.give(this.#block);
  }
}

/** Where a parameter's gradient accumulates. `filled` is false until the first backward pass writes it. */
export interface GradientSlot {
  readonly gradient: Tensor;
  filled: boolean;
  /** Called when the backward pass has made its last addition to the gradient. */
  finished?: (() => void) | null;
}

/** Number of elements of a shape. */
export function elements(shape: Shape): number {
  return shape.reduce((product, size) => product * size, 1);
}

/**
 * Device memory with a shape and a dtype `D`. Row-major and contiguous. The creator frees it (`free`, or a `using`
 * declaration), unless a tape owns it.
 */
export class Tensor<D extends MemoryDtype = Dtype> implements Disposable {
  readonly storage: Storage;
  readonly shape: Shape;
  readonly dtype: D;
  readonly #offset: number;

  constructor(storage: Storage, shape: Shape, dtype: D, offset = 0) {
    this.storage = storage;
    this.shape = shape;
    this.dtype = dtype;
    this.#offset = offset;
  }

  /** A tensor whose memory is not initialised. */
  static empty<D extends MemoryDtype = 'f32'>(device: Device, shape: Shape, dtype = 'f32' as D): Tensor<D> {
    for (const size of shape)
      if (!Number.isSafeInteger(size) || size < 0)
        throw new UsageError(`a tensor's shape must hold integers of at least 0, not [${shape.join(', ')}]`);
    if (!Object.hasOwn(DTYPE_BYTES, dtype))
      throw new UsageError(`unknown dtype ${String(dtype)}: use ${Object.keys(DTYPE_BYTES).join(', ')}`);
    return new Tensor(new Storage(device, elements(shape) * DTYPE_BYTES[dtype]), shape, dtype);
  }

  /** A tensor of zeros. */
  static zeros<D extends MemoryDtype = 'f32'>(device: Device, shape: Shape, dtype = 'f32' as D): Tensor<D> {
    const tensor = Tensor.empty(device, shape, dtype);
    tensor.zero();
    return tensor;
  }

  /** A tensor with the given values, rounded to the dtype. */
  static from<D extends Dtype = 'f32'>(
    device: Device,
    values: ArrayLike<number>,
    shape: Shape,
    dtype = 'f32' as D,
  ): Tensor<D> {
    const tensor = Tensor.empty(device, shape, dtype);
    try {
      tensor.write(values as ArrayLike<Element<D>>);
    } catch (error) {
      tensor.free();
      throw error;
    }
    return tensor;
  }

  /** Where the values are stored. */
  get device(): Device {
    return this.storage.device;
  }
  /** Number of elements. */
  get size(): number {
    return elements(this.shape);
  }
  /** Size of the values in bytes. */
  get bytes(): number {
    return this.size * DTYPE_BYTES[this.dtype];
  }
  /** Address on the device. Throws after the memory was freed. */
  get pointer(): bigint {
    const { freedBy } = this.storage;
    if (freedBy !== null) throw new Error(`${this} was used after its memory was freed by ${freedBy}`);
    return this.storage.address + BigInt(this.#offset);
  }

  /** For error messages: `tensor f32[2, 3]`, with the name of a parameter. */
  toString(): string {
    const { name } = this.storage;
    return `${name === null ? 'tensor' : `parameter ${name}`} ${this.dtype}[${this.shape.join(', ')}]`;
  }

  /** The same memory with another shape. */
  reshape(shape: Shape): Tensor<D> {
    if (elements(shape) !== this.size)
      throw new UsageError(`cannot reshape [${this.shape.join(', ')}] to [${shape.join(', ')}]: the sizes differ`);
    return new Tensor(this.storage, shape, this.dtype, this.#offset);
  }

  /** Rows `from` to `to` (exclusive) of the first dimension, on the same memory. */
  rows(from: number, to: number): Tensor<D> {
    const [count, ...rest] = this.shape;
    if (!(0 <= from && from <= to && to <= count))
      throw new UsageError(`rows ${from} to ${to} are not inside a tensor of ${count} rows`);
    const rowBytes = elements(rest) * DTYPE_BYTES[this.dtype];
    return new Tensor(this.storage, [to - from, ...rest], this.dtype, this.#offset + from * rowBytes);
  }

  /** The same memory as a storage of its own, so that it has its own gradient: a parameter inside a larger block. */
  withOwnStorage(): Tensor<D> {
    return new Tensor(new Storage(this.device, this.bytes, this.storage, this.#offset), this.shape, this.dtype);
  }

  /** Copies the values to the host. Waits for the device. */
  read(): HostArrays[D] {
    return this.#readHost() as HostArrays[D]; // the switch below returns the array of each dtype
  }

  #readHost(): HostArrays[MemoryDtype] {
    const dtype: MemoryDtype = this.dtype;
    switch (dtype) {
      case 'address':
        return this.#download(new BigUint64Array(this.size));
      case 'f32':
        return this.#download(new Float32Array(this.size));
      case 'f64':
        return this.#download(new Float64Array(this.size));
      case 'i32':
        return this.#download(new Int32Array(this.size));
      case 'bf16':
        return bfloat16ToFloat32(this.#download(new Uint16Array(this.size)));
    }
  }

  /** The raw bytes, as a checkpoint stores them. */
  readBytes(): Uint8Array {
    return this.#download(new Uint8Array(this.bytes));
  }

  /** Copies the raw bytes into memory of the host, of exactly their size. */
  readInto(target: Uint8Array): void {
    if (target.byteLength !== this.bytes)
      throw new UsageError(`${target.byteLength} bytes do not hold a tensor of ${this.bytes} bytes`);
    this.device.download(this.pointer, target);
  }

  /** Overwrites the memory with raw bytes. */
  writeBytes(bytes: Uint8Array): void {
    if (bytes.byteLength !== this.bytes)
      throw new UsageError(`${bytes.byteLength} bytes do not fill a tensor of ${this.bytes} bytes`);
    this.device.upload(this.pointer, bytes);
  }

  /** Overwrites all values, rounded to the dtype. */
  write(values: ArrayLike<Element<D>>): void {
    if (values.length !== this.size)
      throw new UsageError(`${values.length} values do not fill a tensor of shape [${this.shape.join(', ')}]`);
    this.writeBytes(bytesOf(encode(values, this.dtype)));
  }

  /** One element: the only one, or that at `index` in row-major order. Waits for the device. */
  item(index?: number): number {
    const at = index ?? 0;
    if (index === undefined && this.size !== 1)
      throw new UsageError(
        `item() reads one element, but the shape is [${this.shape.join(', ')}]: give an index, or use read()`,
      );
    if (!(at >= 0 && at < this.size)) throw new UsageError(`index ${at} is outside a tensor of ${this.size} elements`);
    const one = new Tensor<D>(this.storage, [1], this.dtype, this.#offset + at * DTYPE_BYTES[this.dtype]);
    return Number(one.#readHost()[0]);
  }

  /** Sets every byte to zero. */
  zero(): void {
    this.device.fillZero(this.pointer, this.bytes);
  }

  /** Sets every element of an f32 tensor to `value`. */
  fill(value: number): void {
    if (this.dtype !== 'f32') throw new UsageError(`fill is for f32 tensors, not ${this.dtype}`);
    this.device.fill(this.pointer, value, this.size);
  }

  /** Copies the values of a tensor of the same size, dtype and device. */
  copyFrom(other: Tensor): void {
    if (other.bytes !== this.bytes || other.dtype !== this.dtype)
      throw new UsageError(
        `cannot copy ${other.dtype}[${other.shape.join(', ')}] to ${this.dtype}[${this.shape.join(', ')}]`,
      );
    expectDevice(this.device, other, 'copyFrom');
    this.device.copy(this.pointer, other.pointer, this.bytes);
  }

  /** Returns the memory to the pool. Views of the same memory become invalid too. */
  free(): void {
    this.storage.free('free()', this);
  }

  /** Frees the memory unless that has happened already: for `using`. */
  [dispose](): void {
    if (!this.storage.isFreed) this.storage.free();
  }

  #download<T extends ArrayBufferView>(into: T): T {
    this.device.download(this.pointer, bytesOf(into));
    return into;
  }
}

/** The memory of a typed array as bytes, without a copy. */
export function bytesOf(array: ArrayBufferView): Uint8Array {
  return new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
}

function encode(given: ArrayLike<number | bigint>, dtype: MemoryDtype): ArrayBufferView {
  if (dtype === 'address') return given instanceof BigUint64Array ? given : BigUint64Array.from(given, BigInt);
  const values = given as ArrayLike<number>; // the dtype says which
  switch (dtype) {
    case 'f32':
      return values instanceof Float32Array ? values : Float32Array.from(values);
    case 'f64':
      return values instanceof Float64Array ? values : Float64Array.from(values);
    case 'i32':
      return values instanceof Int32Array ? values : Int32Array.from(values);
    case 'bf16':
      return float32ToBfloat16(values);
  }
}
