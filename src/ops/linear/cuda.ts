import { byDtype, partialSums, strided } from '../../device/cuda/elements.js';
import type { CudaRuntime, MatrixProduct } from '../../device/cuda/runtime.js';
import type { Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

/** Rows of a partial sum of the bias's gradient (cuda.cu has the same). */
const ROWS_PER_PARTIAL = 128;

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const variant = byDtype(cuda, new URL('./cuda.cu', import.meta.url), ['DTYPE']);
  function product(values: MatrixProduct): void {
    const { c, d, m, n, k, accumulate } = values;
    if (m === 0 || n === 0) return;
    const bytes = m * n * (d.dtype === 'bf16' ? 2 : 4);
    if (k > 0) cuda.matrixProduct(values);
    else if (c) cuda.copy(d.pointer, c.pointer, bytes);
    else if (!accumulate) cuda.fillZero(d.pointer, bytes);
  }
  return {
    linear_forward: (x, weight, y, rows, outputs, inputs, accumulate, residual) =>
      product({
        ...{ a: x!, b: weight!, c: residual, d: y!, m: rows, n: outputs, k: inputs },
        ...{ transposeB: true, accumulate: accumulate !== 0 },
      }),
    linear_backward_input: (dy, weight, dx, rows, outputs, inputs, accumulate) =>
      product({ a: dy!, b: weight!, d: dx!, m: rows, n: inputs, k: outputs, accumulate: accumulate !== 0 }),
    linear_backward_weight: (dy, x, dWeight, rows, outputs, inputs, accumulate) =>
      product({
        ...{ a: dy!, b: x!, d: dWeight!, m: outputs, n: inputs, k: rows },
        ...{ transposeA: true, accumulate: accumulate !== 0 },
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
