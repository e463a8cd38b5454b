/** A tensor: device memory with a shape and a dtype. Row-major, always contiguous. */
import type { Block, Device } from '../device/device.js';
import type { MemoryPool } from '../device/pool.js';
import { UsageError } from '../errors.js';
import { bfloat16ToFloat32, float32ToBfloat16 } from './bfloat16.js';

export type Dtype = 'f32' | 'bf16' | 'i32' | 'f64';
export type Shape = readonly number[];

export const DTYPE_BYTES: Record<Dtype, number> = { f32: 4, bf16: 2, i32: 4, f64: 8 };

/** Device memory shared by a tensor and its views; gradients belong to it, so a reshape needs no rule of its own. */
export class Storage {
  readonly device: Device;
  /** What was asked for; the block behind it may be larger. */
  readonly bytes: number;
  /** Null for a part of another storage. */
  readonly #pool: MemoryPool | null;
  readonly #block: Block;
  readonly #whole: Storage | null;
  #freed = false;
  /** Set on the storage of a parameter: where its gradient accumulates. */
  leaf: GradientSlot | null = null;

  /** Memory of its own, or the part of `whole` that begins at `offset`. */
  constructor(device: Device, bytes: number, whole: Storage | null = null, offset = 0) {
    this.device = device;
    this.bytes = bytes;
    this.#whole = whole;
    this.#pool = whole ? null : device.pool; // a device may work in another pool by the time this is freed
    this.#block = this.#pool?.take(bytes) ?? { address: whole!.address + BigInt(offset), bytes };
  }

  get address(): bigint {
    if (this.isFreed) throw new Error('a tensor was used after its memory was freed');
    return this.#block.address;
  }

  get isFreed(): boolean {
    return this.#freed || (this.#whole?.isFreed ?? false);
  }

  /** Freeing a part frees no memory: that goes with the whole. */
  free(): void {
    if (this.#freed) throw new Error('a tensor was freed twice');
    this.#freed = true;
    this.#pool?.give(this.#block);
  }
}

/** Where a parameter's gradient accumulates. `filled` is false until the first backward pass writes it. */
export interface GradientSlot {
  readonly gradient: Tensor;
  filled: boolean;
  /** Called when a backward pass will not add to the gradient any more. */
  finished?: (() => void) | null;
}

export function elements(shape: Shape): number {
  return shape.reduce((product, size) => product * size, 1);
}

export class Tensor {
  readonly storage: Storage;
  readonly shape: Shape;
  readonly dtype: Dtype;
  readonly #offset: number;

  constructor(storage: Storage, shape: Shape, dtype: Dtype, offset = 0) {
    this.storage = storage;
    this.shape = shape;
    this.dtype = dtype;
    this.#offset = offset;
  }

  /** Memory is not initialised. The caller frees it, or lets a Tape own it. */
  static empty(device: Device, shape: Shape, dtype: Dtype = 'f32'): Tensor {
    for (const size of shape)
      if (!Number.isSafeInteger(size) || size < 0)
        throw new UsageError(`a tensor's shape must hold whole numbers from 0, not [${shape.join(', ')}]`);
    return new Tensor(new Storage(device, elements(shape) * DTYPE_BYTES[dtype]), shape, dtype);
  }

  static zeros(device: Device, shape: Shape, dtype: Dtype = 'f32'): Tensor {
    const tensor = Tensor.empty(device, shape, dtype);
    tensor.zero();
    return tensor;
  }

  /** A tensor with the given values; numbers are rounded to the dtype. */
  static from(device: Device, values: ArrayLike<number>, shape: Shape, dtype: Dtype = 'f32'): Tensor {
    const tensor = Tensor.empty(device, shape, dtype);
    try {
      tensor.write(values);
    } catch (error) {
      tensor.free();
      throw error;
    }
    return tensor;
  }

  get device(): Device {
    return this.storage.device;
  }
  get size(): number {
    return elements(this.shape);
  }
  get bytes(): number {
    return this.size * DTYPE_BYTES[this.dtype];
  }
  get pointer(): bigint {
    return this.storage.address + BigInt(this.#offset);
  }

  /** The same memory with another shape. */
  reshape(shape: Shape): Tensor {
    if (elements(shape) !== this.size)
      throw new UsageError(`cannot reshape [${this.shape.join(', ')}] to [${shape.join(', ')}]: the sizes differ`);
    return new Tensor(this.storage, shape, this.dtype, this.#offset);
  }

  /** Rows `from` to `to` (exclusive) of the first dimension, on the same memory. */
  rows(from: number, to: number): Tensor {
    const [count, ...rest] = this.shape;
    if (!(0 <= from && from <= to && to <= count))
      throw new UsageError(`rows ${from} to ${to} are not inside a tensor of ${count} rows`);
    const rowBytes = elements(rest) * DTYPE_BYTES[this.dtype];
    return new Tensor(this.storage, [to - from, ...rest], this.dtype, this.#offset + from * rowBytes);
  }

  /** The same memory as a storage of its own, with a gradient of its own: a parameter's place in a larger piece. */
  apart(): Tensor {
    return new Tensor(new Storage(this.device, this.bytes, this.storage, this.#offset), this.shape, this.dtype);
  }

  /** Copies the values to the host; bf16 is widened to f32. */
  read(): Float32Array | Float64Array | Int32Array {
    switch (this.dtype) {
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

  writeBytes(bytes: Uint8Array): void {
    if (bytes.byteLength !== this.bytes)
      throw new UsageError(`${bytes.byteLength} bytes do not fill a tensor of ${this.bytes} bytes`);
    this.device.upload(this.pointer, bytes);
  }

  write(values: ArrayLike<number>): void {
    if (values.length !== this.size)
      throw new UsageError(`${values.length} values do not fill a tensor of shape [${this.shape.join(', ')}]`);
    this.writeBytes(bytesOf(encode(values, this.dtype)));
  }

  /** One value, for scalars and diagnosis. */
  item(index = 0): number {
    if (!(index >= 0 && index < this.size))
      throw new UsageError(`there is no element ${index} in a tensor of ${this.size}`);
    return new Tensor(this.storage, [1], this.dtype, this.#offset + index * DTYPE_BYTES[this.dtype]).read()[0];
  }

  zero(): void {
    this.device.fillZero(this.pointer, this.bytes);
  }

  /** Every element of an f32 tensor becomes `value`. */
  fill(value: number): void {
    if (this.dtype !== 'f32') throw new UsageError(`fill is for f32 tensors, not ${this.dtype}`);
    this.device.fill(this.pointer, value, this.size);
  }

  copyFrom(other: Tensor): void {
    if (other.bytes !== this.bytes || other.dtype !== this.dtype)
      throw new UsageError(
        `cannot copy ${other.dtype}[${other.shape.join(', ')}] to ${this.dtype}[${this.shape.join(', ')}]`,
      );
    this.device.copy(this.pointer, other.pointer, this.bytes);
  }

  free(): void {
    this.storage.free();
  }

  #download<T extends Float32Array | Float64Array | Int32Array | Uint16Array | Uint8Array>(into: T): T {
    this.device.download(this.pointer, bytesOf(into));
    return into;
  }
}

function bytesOf(array: ArrayBufferView): Uint8Array {
  return new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
}

function encode(values: ArrayLike<number>, dtype: Dtype): ArrayBufferView {
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
