/**
 * The output layer in FP8 (runtime.fp8): the logits, and the products of their gradient, which the loss writes in e5m2. The
 * loss is that of logits with an error of 4 % of a term's size, about 0.05; validation losses are computed in bf16.
 */
import { cudaRuntime } from '../../device/cuda/runtime.js';
import type { Addressable } from '../../device/device.js';
import type { GradientTarget, Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import { codes, Fp8Matrix, isDivisible, MULTIPLE, savesTime, transposeCodes, usesFp8 } from '../linear/fp8.js';
import { crossEntropyCodes, writesCodes } from './cuda.js';

/** Whether the three products save more time than the conversions around them take. */
export function headPays(rows: number, vocab: number, dim: number): boolean {
  // The codes of the logits are read and written once more, and one byte each is not written as bf16. Inputs and weight
  // are read for their maximum, read again and written in both layouts.
  return savesTime(6 * rows * vocab * dim, rows * vocab + 6 * (rows + vocab) * dim);
}

/** The weight in FP8 and the memory that all chunks of tokens share. */
export class Fp8Head {
  readonly #tape: Tape;
  readonly #weight: Fp8Matrix;
  readonly #factor: Tensor;
  /** The gradient of a chunk's logits as [vocab, rows]. */
  readonly #transposed: Tensor<'i32'>;
  readonly #sizes: { readonly vocab: number; readonly dim: number };

  /** `weight` [vocab, dim] bf16, at most `chunk` tokens at a time; all multiples of 16. */
  constructor(tape: Tape, weight: Tensor, chunk: number) {
    const { device } = tape;
    const [vocab, dim] = weight.shape;
    this.#tape = tape;
    this.#sizes = { vocab, dim };
    this.#weight = new Fp8Matrix(device, weight, 'e4m3', { straight: true, transposed: true });
    this.#factor = Tensor.empty(device, [1]);
    this.#transposed = codes(device, chunk * vocab);
  }

  /** Whether a chunk of logits [rows, vocab] can be taken: the last one may have another number of rows. */
  fits(logits: Tensor): boolean {
    const { vocab } = this.#sizes;
    return logits.shape[0] % MULTIPLE === 0 && writesCodes(cudaRuntime(this.#tape.device)!, logits, vocab);
  }

  /** The logits of `x` [rows, dim], and x in FP8, which `backward` takes. */
  forward(x: Tensor, logits: Tensor): Fp8Matrix {
    const { device } = this.#tape;
    const { vocab, dim } = this.#sizes;
    const x8 = new Fp8Matrix(device, x, 'e4m3', { straight: true, transposed: true });
    cudaRuntime(device)!.matrixProduct({
      ...{ a: x8.rowMajor, b: this.#weight.rowMajor, d: logits, m: x8.rows, n: vocab, k: dim, transposeB: true },
      fp8: { a: x8.inverse, b: this.#weight.inverse, fast: true },
    });
    return x8;
  }

  /** Losses of a chunk, and its gradients; the logits' memory is overwritten. Frees `x8`. */
  backward(
    chunk: Record<'logits' | 'targets' | 'inverseCount' | 'losses', Addressable>,
    x8: Fp8Matrix,
    dx: Tensor,
    dWeight: GradientTarget,
  ): void {
    const { device } = this.#tape;
    const cuda = cudaRuntime(device)!;
    const { vocab, dim } = this.#sizes;
    const { rows } = x8;
    const [factor, weight] = [this.#factor, this.#weight];
    crossEntropyCodes(cuda, { ...chunk, factor }, rows, vocab);
    const dLogits = { pointer: chunk.logits.pointer, dtype: 'e5m2' };
    // Rows of codes begin where those of the logits, of twice the size, began.
    cuda.matrixProduct({
      ...{ a: dLogits, strideA: 2 * vocab, b: weight.columnMajor, d: dx, m: rows, n: dim, k: vocab, transposeB: true },
      fp8: { a: factor, b: weight.inverse, fast: false },
    });
    const transposed = { pointer: this.#transposed.pointer, dtype: 'e5m2' };
    transposeCodes(device, dLogits, 2 * vocab, transposed, [rows, vocab]);
    cuda.matrixProduct({
      ...{ a: transposed, b: x8.columnMajor, d: dWeight.gradient, m: vocab, n: dim, k: rows, transposeB: true },
      ...{ accumulate: dWeight.accumulate, fp8: { a: factor, b: x8.inverse, fast: false } },
    });
    x8.free();
  }

  free(): void {
    this.#weight.free();
    this.#factor.free();
    this.#transposed.free();
  }
}

/** Null where FP8 is not asked for, not possible, or no faster. `weight` [vocab, dim], `chunk` tokens at a time. */
export function fp8Head(tape: Tape, x: Tensor, weight: Tensor, chunk: number): Fp8Head | null {
  if (!usesFp8(tape, x)) return null;
  const [vocab, dim] = weight.shape;
  const rows = Math.min(chunk, x.shape[0]);
  return isDivisible(rows, vocab, dim) && headPays(rows, vocab, dim) ? new Fp8Head(tape, weight, rows) : null;
}
