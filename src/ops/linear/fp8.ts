/**
 * Matrix products in FP8 (runtime.fp8) on GPUs that have them: a matrix is converted with one scale, taken from its own
 * largest magnitude, so nothing is carried from step to step. Values and weights are e4m3, gradients e5m2.
 */
import { strided } from '../../device/cuda/elements.js';
import { type CudaRuntime, cudaRuntime, f32 } from '../../device/cuda/runtime.js';
import type { Addressable, Device } from '../../device/device.js';
import type { GradientTarget, Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import type { LargestMagnitude } from '../common/fused-columns.js';
import type { Fp8Format } from './fp8-reference.js';

/** First compute capability, times ten, with FP8 tensor cores. */
const ARCHITECTURE = 89;
/** Sizes of FP8 products are multiples of this. */
export const MULTIPLE = 16;
/** Rows and columns of a block's tile (fp8.cu has the same). */
const TILE = 128;
/**
 * Sums of more terms than this are added up exactly in the backward pass. Fast accumulation keeps about 14 bits: an error
 * of 1e-3, far below that of e5m2's two bits, but it grows with the terms and is always towards zero.
 */
const MAX_FAST_TERMS = 2048;
/** Rows of a weight that a block takes at a time to bound their norms, one per warp. */
const ROWS_PER_BLOCK = 8;
/** Index in a scale of what codes are multiplied by: cuBLASLt refuses products whose factor is not aligned to 16 bytes. */
export const INVERSE = 4;

/** Rates under a training step's load (H200): operations and bytes per second. */
const BF16_RATE = 6.8e14;
const FP8_RATE = 1.15e15;
const BANDWIDTH = 3.8e12;
/** Seconds that must be saved for each second of conversions. */
const WORTH = 1.3;

/** Why a device has no FP8 products; null if it has. */
export function fp8Refusal(device: Device): string | null {
  const architecture = cudaRuntime(device)?.architecture;
  if (architecture === undefined) return `the ${device.kind === 'cpu' ? 'CPU' : 'device'} has no FP8 products`;
  if (architecture < ARCHITECTURE)
    return `${device.name} has compute capability ${architecture / 10}: FP8 products need 8.9 (Ada) or newer`;
  return null;
}

/** Whether products of `x` on this tape may be in FP8. */
export function usesFp8(tape: Tape, x: Tensor): boolean {
  return tape.fp8 && x.dtype === 'bf16' && fp8Refusal(tape.device) === null;
}

/** Whether `operations` of products in FP8 save more time than moving `bytes` for their conversions takes. */
export function savesTime(operations: number, bytes: number): boolean {
  return operations * (1 / BF16_RATE - 1 / FP8_RATE) > (WORTH * bytes) / BANDWIDTH;
}

/** Whether all sizes of a product suit FP8. */
export function isDivisible(...sizes: readonly number[]): boolean {
  return sizes.every((size) => size > 0 && size % MULTIPLE === 0);
}

/** Whether a layer [outputs, inputs] over `rows` rows is computed in FP8: all three products or none. */
export function layerPays(rows: number, outputs: number, inputs: number): boolean {
  if (!isDivisible(rows, outputs, inputs)) return false;
  // x and dy are read for their maximum, read again and written in both layouts; the weight once more.
  const bytes = 6 * rows * (outputs + inputs) + 8 * outputs * inputs;
  return savesTime(6 * rows * outputs * inputs, bytes);
}

/** The same of a layer whose input is in FP8 alone (`fp8Rmsnorm`). */
export function normedLayerPays(rows: number, outputs: number, inputs: number): boolean {
  if (!isDivisible(rows, outputs, inputs)) return false;
  // The codes of x have the bytes of the norm's result in bf16.
  const bytes = 6 * rows * outputs + 8 * outputs * inputs;
  return savesTime(6 * rows * outputs * inputs, bytes);
}

/** Source of a matrix in FP8 (fp8.cu): x itself, SiLU of it, or the gradient of x from that of SiLU. */
export interface Fp8Source {
  readonly kind: 'Plain' | 'Silu' | 'SiluGradient';
  readonly x: Tensor;
  /** The gradient of SiLU's result. */
  readonly dy?: Tensor | null;
}

/** How a matrix comes to its codes. */
export interface Fp8Writer {
  readonly rows: number;
  readonly columns: number;
  /** A new scale with the largest magnitude, or a bound on it, at 0. */
  scale(): Tensor;
  /** Writes the codes in the layouts that the matrix has, and `INVERSE` of its scale. */
  write(matrix: Fp8Matrix): void;
}

/** Codes [rows, columns] of one byte, in the layouts that were asked for, and their scale. */
export class Fp8Matrix {
  readonly format: Fp8Format;
  readonly rows: number;
  readonly columns: number;
  /** f32 [8]: at 0 the largest magnitude or a bound on it, at `INVERSE` what codes are multiplied by. */
  readonly scale: Tensor;
  /** Row by row, and column by column; the memory of one code is a byte. */
  readonly straight: Tensor<'i32'> | null;
  readonly transposed: Tensor<'i32'> | null;

  /**
   * `from` has whole multiples of 16 as sizes; a tensor is bf16 and seen as [rows, columns]. `scale` is that of an earlier
   * conversion of the same values, or has a bound on them at 0.
   */
  constructor(
    device: Device,
    from: Tensor | Fp8Source | Fp8Writer,
    format: Fp8Format,
    layouts: { readonly straight?: boolean; readonly transposed?: boolean },
    scale: Tensor | null = null,
  ) {
    const source = from instanceof Tensor ? ({ kind: 'Plain', x: from } as const) : from;
    const writer = 'write' in source ? source : conversion(device, source);
    this.format = format;
    this.rows = writer.rows;
    this.columns = writer.columns;
    this.scale = scale ?? writer.scale();
    this.straight = layouts.straight ? codes(device, this.rows * this.columns) : null;
    this.transposed = layouts.transposed ? codes(device, this.rows * this.columns) : null;
    writer.write(this);
  }

  /** The factor of codes, one f32 on the device. */
  get inverse(): Addressable {
    return this.scale.rows(INVERSE, INVERSE + 1);
  }

  /** The codes as A [rows, columns] or as the stored B of a product over the columns. */
  get rowMajor(): Addressable {
    return { pointer: this.straight!.pointer, dtype: this.format };
  }

  /** The same of a product over the rows: [columns, rows]. */
  get columnMajor(): Addressable {
    return { pointer: this.transposed!.pointer, dtype: this.format };
  }

  free(): void {
    this.freeCodes();
    this.scale.free();
  }

  /** Frees all but the scale. */
  freeCodes(): void {
    this.straight?.free();
    this.transposed?.free();
  }
}

/**
 * A tensor in FP8 alone: its values are `codes`, in both layouts, the transposed one if the tape records; the layer that takes
 * them frees them. On the tape it is the tensor it was made of, so it has that one's gradient, but the memory of that one is
 * given up: reading its values throws.
 */
export class Fp8Tensor extends Tensor {
  readonly codes: Fp8Matrix;

  constructor(tape: Tape, { storage, shape, dtype }: Tensor, codes: Fp8Matrix) {
    super(storage, shape, dtype);
    this.codes = codes;
    tape.drop(this);
  }
}

function fp8Code(cuda: CudaRuntime, source: Fp8Source['kind'] = 'Plain') {
  return cuda.compile(new URL('./fp8.cu', import.meta.url), { SOURCE: source });
}

/** For the gradient of a layer with the input `x`: null unless the layer is in FP8 and has a backward pass. */
export function largestOfGradient(tape: Tape, x: Tensor): LargestMagnitude | null {
  return tape.recording && x instanceof Fp8Tensor ? { scale: tape.zeros([8]), isKnown: false } : null;
}

/** Uninitialised memory for codes. */
export function codes(device: Device, count: number): Tensor<'i32'> {
  return Tensor.empty(device, [count / 4], 'i32');
}

/** A scale with a bound on rows of `dim` numbers that have been normalised with `weight` f32 [dim]. */
export function normScale(device: Device, weight: Tensor): Tensor {
  const scale = Tensor.empty(device, [8]);
  fp8Code(cudaRuntime(device)!).launch('fp8_norm_bound', { grid: 1, block: 32 }, weight, weight.size, scale);
  return scale;
}

function tiles(rows: number, columns: number) {
  return { grid: [Math.ceil(columns / TILE), Math.ceil(rows / TILE)] as const, block: 256 };
}

function conversion(device: Device, { kind, x, dy = null }: Fp8Source): Fp8Writer {
  const cuda = cudaRuntime(device)!;
  const code = fp8Code(cuda, kind);
  const columns = x.shape[x.shape.length - 1];
  const rows = x.size / columns;
  return {
    rows,
    columns,
    scale: () => {
      const scale = Tensor.zeros(device, [8]);
      code.launch('fp8_largest', strided(cuda, x.size / 8), x, dy, scale, x.size);
      return scale;
    },
    write: (matrix) => {
      const into = [matrix.straight && matrix.rowMajor, matrix.transposed && matrix.columnMajor];
      code.launch(`fp8_${matrix.format}`, tiles(rows, columns), x, dy, matrix.scale, ...into, rows, columns);
    },
  };
}

/** Codes [rows, columns], whose rows begin `stride` bytes apart, as [columns, rows]. */
export function transposeCodes(
  device: Device,
  from: Addressable,
  stride: number,
  into: Addressable,
  [rows, columns]: readonly [number, number],
): void {
  fp8Code(cudaRuntime(device)!).launch('fp8_transpose', tiles(rows, columns), from, stride, into, rows, columns);
}

/** The layer y = x wᵀ in FP8. It holds what its backward pass needs, and the tape frees that. */
export class Fp8Layer {
  /** Tensors that the backward pass reads. */
  readonly saved: readonly Tensor[];
  readonly #device: Device;
  readonly #sizes: { readonly rows: number; readonly outputs: number; readonly inputs: number };
  readonly #weight: Tensor;
  readonly #weightScale: Tensor;
  readonly #x: Fp8Matrix;

  /**
   * `y` [rows, outputs] receives the result, `residual` of its shape added; null to leave it out. `x` in FP8 has the layout
   * of rows if there is y, and the other one if the tape records; the layer frees it.
   */
  constructor(tape: Tape, x: Tensor | Fp8Matrix, weight: Tensor, y: Tensor | null, residual: Tensor | null) {
    const { device } = tape;
    const [outputs, inputs] = weight.shape;
    this.#device = device;
    this.#weight = weight;
    const layouts = { straight: y !== null, transposed: tape.recording };
    this.#x = x instanceof Fp8Matrix ? x : new Fp8Matrix(device, x, 'e4m3', layouts);
    this.#sizes = { rows: this.#x.rows, outputs, inputs };
    const w = new Fp8Matrix(device, weight, 'e4m3', { straight: y !== null });
    this.#weightScale = w.scale;
    if (y) {
      const { rows } = this.#sizes;
      cudaRuntime(device)!.matrixProduct({
        ...{ a: this.#x.rowMajor, b: w.rowMajor, c: residual, d: y, m: rows, n: outputs, k: inputs },
        ...{ transposeB: true, fp8: { a: this.#x.inverse, b: w.inverse, fast: true } },
      });
      this.#x.straight!.free();
      w.straight!.free();
    }
    const held = [this.#x.transposed, this.#x.scale, w.scale].filter((tensor) => tensor !== null);
    for (const tensor of held) tape.own(tensor);
    this.saved = [...held, weight];
  }

  /** Ends the forward pass's use of what is saved; call it after `tape.record`. */
  drop(tape: Tape): void {
    for (const tensor of this.saved) if (tensor !== this.#weight) tape.drop(tensor);
  }

  /**
   * A scale for SiLU of y, from a bound, where x was normalised (`normScale`): the largest magnitude would cost a pass over y. The bound is
   * above it by a factor of 6 or so, and e4m3 keeps its three bits over 15 powers of two.
   */
  activationScale(): Tensor {
    const { outputs, inputs } = this.#sizes;
    const scale = Tensor.zeros(this.#device, [8]);
    const shape = { grid: Math.ceil(outputs / ROWS_PER_BLOCK), block: 32 * ROWS_PER_BLOCK };
    const code = fp8Code(cudaRuntime(this.#device)!);
    code.launch('fp8_silu_bound', shape, this.#weight, this.#x.scale, scale, outputs, inputs);
    return scale;
  }

  /**
   * A scale for SiLU's gradient of dx = dy w, from a bound: `dy` and the weight are known, and e5m2 has range to spare.
   * The largest magnitude would cost a pass over dx and over SiLU's input.
   */
  slopeScale(dy: Fp8Matrix): Tensor {
    const scale = Tensor.empty(this.#device, [8]);
    const terms = f32(this.#sizes.outputs);
    fp8Code(cudaRuntime(this.#device)!).launch(
      'fp8_slope_bound',
      { grid: 1, block: 1 },
      ...[dy.scale, this.#weightScale, terms, scale],
    );
    return scale;
  }

  /**
   * dx = dy w and dw = dyᵀ x; a target of null is left out. `dy` in FP8 has both layouts, and is freed. `scale` has its
   * largest magnitude at 0, where that is known; it is not freed.
   */
  backward(
    dy: Tensor | Fp8Matrix,
    dx: GradientTarget | null,
    dWeight: GradientTarget | null,
    scale: Tensor | null = null,
  ): void {
    const device = this.#device;
    const cuda = cudaRuntime(device)!;
    const { rows, outputs, inputs } = this.#sizes;
    const layouts = { straight: dx !== null, transposed: dWeight !== null };
    const dy8 = dy instanceof Fp8Matrix ? dy : new Fp8Matrix(device, dy, 'e5m2', layouts, scale);
    if (dx) {
      const w = new Fp8Matrix(device, this.#weight, 'e4m3', { transposed: true }, this.#weightScale);
      cuda.matrixProduct({
        ...{ a: dy8.rowMajor, b: w.columnMajor, d: dx.gradient, m: rows, n: inputs, k: outputs, transposeB: true },
        ...{ accumulate: dx.accumulate, fp8: { a: dy8.inverse, b: w.inverse, fast: outputs <= MAX_FAST_TERMS } },
      });
      w.transposed!.free();
    }
    if (dWeight) {
      const x = this.#x;
      cuda.matrixProduct({
        ...{ a: dy8.columnMajor, b: x.columnMajor, d: dWeight.gradient, m: outputs, n: inputs, k: rows },
        ...{ transposeB: true, accumulate: dWeight.accumulate, fp8: { a: dy8.inverse, b: x.inverse, fast: false } },
      });
    }
    dy8.freeCodes();
    if (dy8.scale !== scale) dy8.scale.free();
  }
}

/** The layer of a tape that asks for FP8 where that saves time; null where it does not. */
export function fp8Layer(
  tape: Tape,
  x: Tensor,
  weight: Tensor,
  y: Tensor | null,
  residual: Tensor | null = null,
): Fp8Layer | null {
  if (!usesFp8(tape, x)) return null;
  const [outputs, inputs] = weight.shape;
  return layerPays(x.size / inputs, outputs, inputs) ? new Fp8Layer(tape, x, weight, y, residual) : null;
}
