import { aligned, byDtype, partialSums, strided } from '../../device/cuda/elements.js';
import type { CudaCode, CudaRuntime, MatrixProduct } from '../../device/cuda/runtime.js';
import type { Addressable, Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

/** Rows of a partial sum of the bias's gradient (cuda.cu has the same). */
const ROWS_PER_PARTIAL = 128;

/**
 * Limits of narrow.cu: outputs and numbers of the weight at most (it must stay in the L1 cache), what the inputs are a
 * multiple of, and the rows from which on it pays.
 */
const NARROW = { outputs: 64, weight: 2 ** 16, inputs: 32, rows: 256 };
/** Rows and, in the backward pass, columns of a block of narrow.cu. */
const NARROW_ROWS = 256;
const NARROW_COLUMNS = 256;

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const variant = byDtype(cuda, new URL('./cuda.cu', import.meta.url), ['DTYPE']);
  function product(values: MatrixProduct): void {
    const { c, d, m, n, k, accumulate, batch = 1 } = values;
    if (m === 0 || n === 0 || batch === 0) return;
    const bytes = batch * m * n * (d.dtype === 'bf16' ? 2 : 4);
    if (k > 0) cuda.matrixProduct(values);
    else if (c) cuda.copy(d.pointer, c.pointer, bytes);
    else if (!accumulate) cuda.fillZero(d.pointer, bytes);
  }
  /** The code for a layer of few outputs, null where the general product is to be taken. */
  function narrow(rows: number, outputs: number, inputs: number, ...tensors: Addressable[]): CudaCode | null {
    if (outputs > NARROW.outputs || outputs % 2 !== 0 || rows < NARROW.rows) return null;
    if (inputs === 0 || inputs % NARROW.inputs !== 0 || outputs * inputs > NARROW.weight) return null;
    if (!tensors.every(({ dtype }) => dtype === 'bf16') || !aligned(...tensors)) return null;
    return cuda.compile(new URL('./narrow.cu', import.meta.url), { OUTPUTS: outputs });
  }
  return {
    linear_forward: (x, weight, y, rows, outputs, inputs, accumulate, residual) => {
      const code = residual || accumulate ? null : narrow(rows, outputs, inputs, x!, weight!, y!);
      if (code) {
        const shape = { grid: Math.ceil(rows / NARROW_ROWS), block: 256 };
        code.launch('narrow_forward', shape, x, weight, y, rows, inputs);
        return;
      }
      product({
        a: x!,
        b: weight!,
        c: residual,
        d: y!,
        m: rows,
        n: outputs,
        k: inputs,
        transposeB: true,
        accumulate: accumulate !== 0,
      });
    },
    linear_backward_input: (dy, weight, dx, rows, outputs, inputs, accumulate) => {
      const code = narrow(rows, outputs, inputs, dy!, weight!, dx!);
      if (code) {
        const grid = [Math.ceil(rows / NARROW_ROWS), Math.ceil(inputs / NARROW_COLUMNS)] as const;
        code.launch('narrow_backward_input', { grid, block: 256 }, dy, weight, dx, rows, inputs, accumulate);
        return;
      }
      product({ a: dy!, b: weight!, d: dx!, m: rows, n: inputs, k: outputs, accumulate: accumulate !== 0 });
    },
    linear_backward_weight: (dy, x, dWeight, rows, outputs, inputs, accumulate) =>
      product({
        a: dy!,
        b: x!,
        d: dWeight!,
        m: outputs,
        n: inputs,
        k: rows,
        transposeA: true,
        accumulate: accumulate !== 0,
      }),
    matrix_products: (a, b, c, d, batch, m, n, k, transposeA, transposeB, alpha, beta) =>
      product({
        ...{ a: a!, b: b!, c, d: d!, m, n, k, batch, alpha, beta },
        ...{ transposeA: transposeA !== 0, transposeB: transposeB !== 0 },
      }),
    bias_forward: (y, bias, rows, outputs) =>
      variant(y!).launch('bias_forward', strided(cuda, rows * outputs), y, bias, rows, outputs),
    bias_backward: (dy, dBias, rows, outputs, accumulate) => {
      const partials = Math.ceil(rows / ROWS_PER_PARTIAL);
      const code = variant(dy!);
      cuda.withScratch(4 * partials * outputs, (partial) => {
        const grid = [Math.ceil(outputs / 32), partials] as const;
        code.launch('bias_partial', { grid, block: 256 }, dy, partial, rows, outputs);
        code.launch('bias_backward', partialSums(outputs), partial, partials, dBias, outputs, accumulate);
      });
    },
  };
}
