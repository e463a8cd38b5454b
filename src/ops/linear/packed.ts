/**
 * Weights of linear layers that are only read: packed once, when a model is loaded, in the order in which products read them
 * (packed.h), and in the type of the model's file or in int8. CPU only.
 */
import { type Device, defineKernels } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import { type Shape, Tensor } from '../../tensor/tensor.js';

export const packedSignatures = {
  packed_bytes: ['ptr', 'i64', 'i64', 'i64'],
  linear_pack: ['ptr', 'i64', 'i64', 'i64', 'ptr', 'i64', 'i64', 'i64', 'i64', 'i64', 'ptr'],
  linear_packed: ['ptr', 'ptr', 'i64', 'ptr', 'i64', 'i64', 'i64', 'ptr'],
  packed_rows: ['ptr', 'i64', 'ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, packedSignatures);

/**
 * The type of a packed matrix: the numbers of a file as they are, or int8 with one scale for each output and 64 inputs, whose
 * products round their activations in the same way. In the order of `with_type` in packed.h.
 */
export const WEIGHT_TYPES = ['f32', 'bf16', 'f16', 'int8'] as const;
export type WeightType = (typeof WEIGHT_TYPES)[number];

/** Memory of a packed matrix: a multiple of 8. */
export function packedBytes(device: Device, [outputs, inputs]: Shape, type: WeightType): number {
  const size = Tensor.empty(device, [1], 'f64');
  device.kernels(kernels).packed_bytes(size, WEIGHT_TYPES.indexOf(type), outputs, inputs);
  const bytes = size.item();
  size.free();
  return bytes;
}

/** Consecutive rows of a matrix in an open file. */
export interface RowsInFile {
  readonly descriptor: number;
  /** Byte of the first number. */
  readonly offset: number;
  readonly rows: number;
}

/**
 * A matrix [outputs, inputs] for `linear`, `linearCrossEntropyLosses` and `embedding`. Its values are f32; the memory behind
 * them is not that of a tensor, so all other kernels refuse it. `read` returns the values.
 */
export class PackedMatrix extends Tensor<'f32'> {
  readonly type: WeightType;
  /** All bytes, for programs that move or sum them. */
  readonly memory: Tensor;

  /** Room for a matrix, not filled yet: memory of its own, or `memory` of at least `packedBytes`. */
  constructor(
    device: Device,
    shape: Shape,
    type: WeightType,
    memory: Tensor = Tensor.empty(device, [packedBytes(device, shape, type) / 4], 'i32'),
  ) {
    super(memory.storage, shape, 'f32');
    this.type = type;
    this.memory = memory;
  }

  /** The values of a tensor f32 [outputs, inputs]. */
  static of(tensor: Tensor, type: 'f32' | 'int8' = 'f32'): PackedMatrix {
    const matrix = new PackedMatrix(tensor.device, tensor.shape, type);
    matrix.pack(tensor);
    return matrix;
  }

  /** Takes the values of a tensor f32 of its shape; the type must be f32 or int8. */
  pack(tensor: Tensor): void {
    this.#pack({ source: tensor, held: 'f32', first: 0, rows: tensor.shape[0] });
  }

  /**
   * Reads all rows from files, on all cores, each row once. `held` is the type of the numbers in the files. False if a file is
   * too short.
   */
  readRows(parts: readonly RowsInFile[], held: Exclude<WeightType, 'int8'>): boolean {
    if (this.type !== held && this.type !== 'int8') throw new Error(`${held} cannot be packed as ${this.type}`);
    let first = 0;
    for (const part of parts) {
      if (!this.#pack({ ...part, source: null, held, first })) return false;
      first += part.rows;
    }
    if (first !== this.shape[0]) throw new Error(`${first} rows do not fill ${this}`);
    return true;
  }

  #pack({
    source,
    held,
    first,
    rows,
    descriptor = -1,
    offset = 0,
  }: {
    readonly source: Tensor | null;
    readonly held: WeightType;
    readonly first: number;
    readonly rows: number;
    readonly descriptor?: number;
    readonly offset?: number;
  }): boolean {
    const [outputs, inputs] = this.shape;
    const [from, to] = [held, this.type].map((type) => WEIGHT_TYPES.indexOf(type));
    const failed = Tensor.zeros(this.device, [1], 'i32');
    const kernel = this.device.kernels(kernels);
    kernel.linear_pack(source, descriptor, offset, from, this.memory, to, outputs, inputs, first, rows, failed);
    const isFilled = failed.item() === 0;
    failed.free();
    return isFilled;
  }

  /** y [rows, outputs] = x [rows, inputs] wᵀ, with the residual added unless it is null. */
  multiply(x: Tensor, y: Tensor, rows: number, residual: Tensor | null = null): void {
    const [outputs, inputs] = this.shape;
    const type = WEIGHT_TYPES.indexOf(this.type);
    this.device.kernels(kernels).linear_packed(x, this.memory, type, y, rows, outputs, inputs, residual);
  }

  /** Copies the rows `ids` i32 [n] to `y` [n, inputs]; `firstBad` i32 [1] becomes the first of them that is no row, or -1. */
  copyRows(ids: Tensor, y: Tensor, firstBad: Tensor): void {
    const [outputs, inputs] = this.shape;
    const type = WEIGHT_TYPES.indexOf(this.type);
    this.device.kernels(kernels).packed_rows(this.memory, type, ids, y, firstBad, ids.size, outputs, inputs);
  }

  /** Throws: only the kernels of this file know how the numbers lie. */
  override get pointer(): bigint {
    throw this.#refusal();
  }

  override rows(): never {
    throw this.#refusal();
  }

  override reshape(): never {
    throw this.#refusal();
  }

  override read(): Float32Array {
    const [outputs] = this.shape;
    const ids = Tensor.from(
      this.device,
      Int32Array.from({ length: outputs }, (_, i) => i),
      [outputs],
      'i32',
    );
    const [y, firstBad] = [Tensor.empty(this.device, this.shape), Tensor.empty(this.device, [1], 'i32')];
    this.copyRows(ids, y, firstBad);
    const values = y.read();
    for (const tensor of [ids, y, firstBad]) tensor.free();
    return values;
  }

  override readBytes(): Uint8Array {
    return new Uint8Array(this.read().buffer);
  }

  #refusal(): UsageError {
    return new UsageError(
      `${this} is packed in ${this.type} for reading only: load the model with { trainable: true } to train or change it`,
    );
  }
}
