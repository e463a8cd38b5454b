/**
 * What an operation's cuda.ts is given to launch its kernels with. Everything goes to one stream in the order of the
 * calls, nothing waits, and memory given back to the pool may be handed out again at once: the stream keeps the order.
 */
import type { Addressable } from '../device.js';

/**
 * A kernel argument: memory (or null), or a number. Numbers are whole (for parameters of type int and i64 alike) unless
 * wrapped in `f32` or `f64`.
 */
export type LaunchArgument = Addressable | bigint | null | number | Floating;

/** A floating-point argument of a launch. */
export class Floating {
  readonly value: number;
  readonly double: boolean;

  constructor(value: number, double: boolean) {
    this.value = value;
    this.double = double;
  }
}

export const f32 = (value: number) => new Floating(value, false);
export const f64 = (value: number) => new Floating(value, true);

/** Grid, block and shared memory of a launch. */
export interface LaunchShape {
  /** Blocks; a launch with none of them does nothing. */
  readonly grid: number | readonly [number, number] | readonly [number, number, number];
  /** Threads of a block. */
  readonly block: number;
  /** Bytes of dynamic shared memory. */
  readonly shared?: number;
  /**
   * The kernel may start while the one launched before it still runs; it waits by itself (griddepcontrol.wait) before it
   * touches what that one writes. Hopper and newer; others ignore it.
   */
  readonly overlap?: boolean;
}

/** A compiled source file. */
export interface CudaCode {
  launch(name: string, shape: LaunchShape, ...values: LaunchArgument[]): void;
  /** The value of an `extern "C" __device__ int` of the source (EXPORT in common.cuh). */
  constant(name: string): number;
}

/** Macros by name; a change of one is another compilation. */
export type Macros = Readonly<Record<string, number | string>>;

/** D[m,n] = A[m,k] B[k,n] (+ D or C), all row-major; a transposed operand lies in memory as [k,m] or [n,k]. */
export interface MatrixProduct {
  readonly a: Addressable;
  readonly b: Addressable;
  readonly d: Addressable;
  readonly m: number;
  readonly n: number;
  readonly k: number;
  readonly transposeA?: boolean;
  readonly transposeB?: boolean;
  /** Adds the product to what is in D. */
  readonly accumulate?: boolean;
  /** Added to the product, of D's shape and dtype: its sum with the product is rounded once. Not with `accumulate`. */
  readonly c?: Addressable | null;
}

/** What CUDA launchers need of a device. */
export interface CudaRuntime {
  readonly multiprocessors: number;
  /** Compute capability times ten: 80 for an A100, 90 for an H100 or H200. */
  readonly architecture: number;
  /** The code of a source file (`new URL('./cuda.cu', import.meta.url)`), compiled for this GPU once and cached. */
  compile(source: URL, macros?: Macros): CudaCode;
  /** bf16 operands give bf16 or f32, f32 operands give f32; sums are f32. */
  matrixProduct(product: MatrixProduct): void;
  /** Memory for the launches made inside `use`. */
  withScratch<T>(bytes: number, use: (address: bigint) => T): T;
  fillZero(address: bigint, bytes: number): void;
  copy(to: bigint, from: bigint, bytes: number): void;
}
