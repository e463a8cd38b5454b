/** A linear layer: y = x wᵀ (+ bias) (+ residual), with w [outputs, inputs] as checkpoints store it. */
import { type Device, defineKernels } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import type { GradientTarget, Tape } from '../../tensor/tape.js';
import { elements, Tensor } from '../../tensor/tensor.js';
import { addInto } from '../add/op.js';
import type { LargestMagnitude } from '../common/fused-columns.js';
import { expectFloats, expectShape } from '../common/shapes.js';
import { launchers } from './cuda.js';
import { Fp8Layer, Fp8Tensor, fp8Layer } from './fp8.js';
import { PackedMatrix } from './packed.js';

const product = ['ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64', 'i64'] as const;
export const signatures = {
  linear_forward: [...product, 'ptr'],
  linear_backward_input: product,
  linear_backward_weight: product,
  matrix_products: ['ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64', 'f32', 'f32'],
  bias_forward: ['ptr', 'ptr', 'i64', 'i64'],
  bias_backward: ['ptr', 'ptr', 'i64', 'i64', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/**
 * `x` [..., inputs] seen as rows, `weight` [outputs, inputs] of x's dtype, `bias` f32 [outputs] → [rows, outputs]. A
 * `residual` of that shape and of x's dtype is added: on a GPU inside the product, which saves a pass over both.
 * Without `computesResult` the result is not computed: only gradients pass through it.
 */
export function linear(
  tape: Tape,
  x: Tensor,
  weight: Tensor,
  bias: Tensor | null | undefined = null,
  residual: Tensor | null = null,
  computesResult = true,
): Tensor {
  const [outputs, inputs] = expectFloats('linear: weight', weight, [-1, -1]);
  const rows = rowsOf(x);
  expectShape('linear: x', x.reshape([rows, x.shape[x.shape.length - 1]]), [-1, inputs], weight.dtype);
  if (bias) expectShape('linear: bias', bias, [outputs]);
  if (residual) expectShape('linear: residual', residual, [rows, outputs], x.dtype);
  const kernel = tape.device.kernels(kernels);
  const y = tape.empty([rows, outputs], x.dtype);
  const fp8 = fp8Layer(tape, x, weight, computesResult ? y : null, residual);
  if (computesResult && weight instanceof PackedMatrix) weight.multiply(x, y, rows, residual);
  else if (computesResult && !fp8) kernel.linear_forward(x, weight, y, rows, outputs, inputs, 0, residual);
  if (computesResult && bias) kernel.bias_forward(y, bias, rows, outputs);
  tape.record([x, weight, bias ?? null, residual], [y], fp8?.saved ?? [x, weight], () => {
    const dy = tape.gradient(y);
    if (!dy) return;
    if (residual) tape.passGradient(y, residual, (into, value) => addInto(tape.device, into, value));
    const dx = tape.gradientTarget(x);
    if (dx && !fp8) linearInputGradient(tape.device, dy, weight, dx);
    const dWeight = tape.gradientTarget(weight);
    if (dWeight && !fp8) linearWeightGradient(tape.device, dy, x, dWeight);
    fp8?.backward(dy, dx, dWeight);
    const dBias = bias && tape.gradientTarget(bias);
    if (dBias) kernel.bias_backward(dy, dBias.gradient, rows, outputs, Number(dBias.accumulate));
  });
  fp8?.drop(tape);
  return y;
}

/**
 * Several layers of one input as one product. `stacked` [outputs, inputs] of x's dtype holds the rows of `parts` f32
 * (their values) one after another, and zeros where it has more rows; x's gradient is that of all, weights' gradients
 * are the parts'. `largest`, of `largestOfGradient`, may be filled by what writes the result's gradient.
 */
export function stackedLinear(
  tape: Tape,
  x: Tensor,
  stacked: Tensor,
  parts: readonly Tensor[],
  largest: LargestMagnitude | null = null,
): Tensor {
  const [outputs, inputs] = expectFloats('stackedLinear: weight', stacked, [-1, -1]);
  const rows = rowsOf(x);
  expectShape('stackedLinear: x', x.reshape([rows, x.shape[x.shape.length - 1]]), [-1, inputs], stacked.dtype);
  for (const part of parts) expectShape('stackedLinear: a part', part, [-1, inputs]);
  const filled = parts.reduce((total, part) => total + part.shape[0], 0);
  if (filled > outputs) throw new UsageError(`stackedLinear: ${filled} rows of parts do not fit ${outputs} outputs`);
  const y = tape.empty([rows, outputs], x.dtype);
  const fp8 = x instanceof Fp8Tensor ? new Fp8Layer(tape, x.codes, stacked, y, null) : fp8Layer(tape, x, stacked, y);
  if (!fp8) linearInto(tape.device, x, stacked, y);
  const saved = [...(fp8?.saved ?? [x, stacked]), ...(largest ? [largest.scale] : [])];
  tape.record([x, ...parts], [y], saved, () => {
    const dy = tape.gradient(y);
    if (!dy) return;
    const dx = tape.gradientTarget(x);
    const isTrained = parts.some((part) => tape.tracks(part));
    const whole = isTrained ? { gradient: Tensor.empty(tape.device, [outputs, inputs]), accumulate: false } : null;
    if (fp8) fp8.backward(dy, dx, whole, largest?.isKnown ? largest.scale : null);
    else {
      if (dx) linearInputGradient(tape.device, dy, stacked, dx);
      if (whole) linearWeightGradient(tape.device, dy, x, whole);
    }
    if (!whole) return;
    const { gradient } = whole;
    let first = 0;
    for (const part of parts) {
      const own = gradient.rows(first, first + part.shape[0]);
      first += part.shape[0];
      const target = tape.gradientTarget(part);
      if (target?.accumulate) addInto(tape.device, target.gradient, own);
      else target?.gradient.copyFrom(own);
    }
    gradient.free();
  });
  fp8?.drop(tape);
  if (largest) tape.drop(largest.scale);
  return y;
}

/**
 * `y` [rows, outputs] with the outputs of a layer added to its columns from `from` on: `x` [rows, inputs], `weight`
 * [columns, inputs] of x's dtype. Drops `y`. The other columns are a product with zeros, which is cheap where `inputs` is
 * small. `computesResult`: see `linear`.
 */
export function addLinearColumns(
  tape: Tape,
  x: Tensor,
  weight: Tensor,
  y: Tensor,
  from: number,
  computesResult = true,
): Tensor {
  const { device } = tape;
  const [rows, outputs] = expectFloats('addLinearColumns: y', y, [-1, -1]);
  const [columns, inputs] = expectShape('addLinearColumns: weight', weight, [-1, -1], x.dtype);
  expectShape('addLinearColumns: x', x, [rows, inputs], y.dtype);
  const isWhole = from === 0 && columns === outputs;
  const placed = isWhole ? weight : tape.zeros([outputs, inputs], x.dtype);
  if (!isWhole) placed.rows(from, from + columns).copyFrom(weight);
  const out = tape.empty([rows, outputs], y.dtype);
  if (computesResult) device.kernels(kernels).linear_forward(x, placed, out, rows, outputs, inputs, 0, y);
  tape.record([x, weight, y], [out], [x, placed], () => {
    const dOut = tape.gradient(out);
    if (!dOut) return;
    tape.passGradient(out, y, (into, value) => addInto(device, into, value));
    const dx = tape.gradientTarget(x);
    if (dx) linearInputGradient(device, dOut, placed, dx);
    const target = tape.gradientTarget(weight);
    if (!target) return;
    if (isWhole) {
      linearWeightGradient(device, dOut, x, target);
      return;
    }
    const whole = Tensor.empty(device, [outputs, inputs]);
    linearWeightGradient(device, dOut, x, { gradient: whole, accumulate: false });
    const own = whole.rows(from, from + columns);
    if (target.accumulate) addInto(device, target.gradient, own);
    else target.gradient.copyFrom(own);
    whole.free();
  });
  tape.drop(y);
  if (!isWhole) tape.drop(placed);
  return out;
}

/** y = x wᵀ into given memory, outside any tape. */
export function linearInto(device: Device, x: Tensor, weight: Tensor, y: Tensor, accumulate = false): void {
  const [outputs, inputs] = weight.shape;
  if (weight instanceof PackedMatrix && !accumulate) weight.multiply(x, y, rowsOf(y));
  else device.kernels(kernels).linear_forward(x, weight, y, rowsOf(y), outputs, inputs, Number(accumulate), null);
}

/** dx = dy w, added if the target accumulates. */
export function linearInputGradient(device: Device, dy: Tensor, weight: Tensor, dx: GradientTarget): void {
  const [outputs, inputs] = weight.shape;
  device
    .kernels(kernels)
    .linear_backward_input(dy, weight, dx.gradient, rowsOf(dy), outputs, inputs, Number(dx.accumulate));
}

/** dw = dyᵀ x, added if the target accumulates. */
export function linearWeightGradient(device: Device, dy: Tensor, x: Tensor, dWeight: GradientTarget): void {
  const [outputs, inputs] = dWeight.gradient.shape;
  device
    .kernels(kernels)
    .linear_backward_weight(dy, x, dWeight.gradient, rowsOf(dy), outputs, inputs, Number(dWeight.accumulate));
}

/** Operands of `matrixProducts`: `count` matrices each, one after another, all of one dtype. */
export interface MatrixProducts {
  /** [count, m, k], or [count, k, m] with `transposeA`. */
  readonly a: Tensor;
  /** [count, k, n], or [count, n, k] with `transposeB`. */
  readonly b: Tensor;
  /** [count, m, n], another tensor than `d`; null adds nothing. */
  readonly c?: Tensor | null;
  /** The result [count, m, n]. */
  readonly d: Tensor;
  readonly transposeA?: boolean;
  readonly transposeB?: boolean;
  readonly alpha?: number;
  readonly beta?: number;
}

/** d = alpha a b + beta c for each matrix of a batch, outside any tape. */
export function matrixProducts(device: Device, products: MatrixProducts): void {
  const { a, b, c = null, d, transposeA = false, transposeB = false, alpha = 1, beta = 1 } = products;
  const [count, m, n] = expectFloats('matrixProducts: d', d, [-1, -1, -1]);
  const k = a.shape[transposeA ? 1 : 2];
  expectShape('matrixProducts: a', a, transposeA ? [count, k, m] : [count, m, k], d.dtype);
  expectShape('matrixProducts: b', b, transposeB ? [count, n, k] : [count, k, n], d.dtype);
  if (c) expectShape('matrixProducts: c', c, [count, m, n], d.dtype);
  const transposed = [Number(transposeA), Number(transposeB)] as const;
  device.kernels(kernels).matrix_products(a, b, c, d, count, m, n, k, ...transposed, alpha, beta);
}

function rowsOf(x: Tensor): number {
  return elements(x.shape.slice(0, -1));
}
