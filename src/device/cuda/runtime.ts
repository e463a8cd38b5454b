/**
 * The interface with which an operation's cuda.ts launches its kernels. All launches go to one stream in call order and
 * return at once. Memory returned to the pool may be reused at once, because the stream keeps the order.
 */
import type { Addressable, Device } from '../device.js';

/**
 * A kernel argument: memory (or null), or a number. Numbers are integers (for parameters of type int and i64) unless wrapped
 * in `f32` or `f64`.
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

/** An argument of type float. */
export const f32 = (value: number) => new Floating(value, false);
/** An argument of type double. */
export const f64 = (value: number) => new Floating(value, true);

/** Grid, block and shared memory of a launch. */
export interface LaunchShape {
  /** Blocks; an empty grid is a no-op. */
  readonly grid: number | readonly [number, number] | readonly [number, number, number];
  /** Threads per block. */
  readonly block: number;
  /** Bytes of dynamic shared memory. */
  readonly shared?: number;
  /**
   * The kernel may start while the previous one still runs, and must itself wait (griddepcontrol.wait) before it reads that
   * one's results. Ignored before Hopper.
   */
  readonly overlap?: boolean;
}

/** A compiled source file. */
export interface CudaCode {
  /** Queues the kernel of this name. */
  launch(name: string, shape: LaunchShape, ...values: LaunchArgument[]): void;
  /** The value of an `extern "C" __device__ int` of the source (EXPORT in common.cuh). */
  constant(name: string): number;
}

/** Macros by name. Each combination is compiled separately. */
export type KernelMacros = Readonly<Record<string, number | string>>;

/**
 * D[m,n] = alpha A[m,k] B[k,n] (+ D or beta C), all row-major; a transposed operand is stored as [k,m] or [n,k]. FP8
 * operands (dtypes e4m3 and e5m2, not both e5m2) are multiplied along contiguous terms only, so that A is [m,k] and B
 * transposed, and every size is a multiple of 16.
 */
export interface MatrixProduct {
  readonly a: Addressable;
  readonly b: Addressable;
  readonly d: Addressable;
  readonly m: number;
  readonly n: number;
  readonly k: number;
  readonly transposeA?: boolean;
  readonly transposeB?: boolean;
  /** Adds the product to D. */
  readonly accumulate?: boolean;
  /** Added to the product before rounding; has D's shape and dtype. Not with `accumulate`. */
  readonly c?: Addressable | null;
  /** Factor on the product. Default 1. */
  readonly alpha?: number;
  /** Factor on C. Default 1. */
  readonly beta?: number;
  /** Products of this many matrices, one after another in the memory of each operand. Default 1. */
  readonly batch?: number;
  /** Elements between the starts of two rows of A [m,k]; defaults to k. */
  readonly strideA?: number;
  /**
   * For FP8 operands only: what the codes of A and B are to be multiplied by, one f32 each on the device. `fast` sums in
   * the tensor cores' accumulators, which are faster and less exact (about 14 bits) than f32.
   */
  readonly fp8?: { readonly a: Addressable; readonly b: Addressable; readonly fast: boolean };
}

/** The part of a device that CUDA launchers use. */
export interface CudaRuntime {
  readonly multiprocessors: number;
  /** Compute capability times ten: 80 for an A100, 90 for an H100 or H200. */
  readonly architecture: number;
  /** The code of a source file (`new URL('./cuda.cu', import.meta.url)`), compiled for this GPU once and cached. */
  compile(source: URL, macros?: KernelMacros): CudaCode;
  /** bf16 and FP8 operands produce bf16 or f32, f32 operands f32. Accumulates in f32. */
  matrixProduct(product: MatrixProduct): void;
  /** Temporary memory for the launches inside `use`. */
  withScratch<T>(bytes: number, use: (address: bigint) => T): T;
  /** Sets bytes at an address to zero. */
  fillZero(address: bigint, bytes: number): void;
  /** Copies bytes from one address to another. */
  copy(to: bigint, from: bigint, bytes: number): void;
}

/** The CUDA runtime of a device; null for other devices and for wrappers around a CUDA device. */
export function cudaRuntime(device: Device): (Device & CudaRuntime) | null {
  return device.kind === 'cuda' && 'compile' in device ? (device as Device & CudaRuntime) : null;
}
