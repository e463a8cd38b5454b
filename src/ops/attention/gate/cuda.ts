import { byDtype, partialSums, strided } from '../../../device/cuda/elements.js';
import { type CudaRuntime, f32 } from '../../../device/cuda/runtime.js';
import type { Kernels } from '../../../device/device.js';
import type { signatures } from './op.js';

/** Rows of a partial result (the same in op.ts and cuda.cu). */
const ROWS_PER_PARTIAL = 4096;
/** Tokens of a partial sum of the bias's gradient (the same in cuda.cu). */
const TOKENS_PER_PARTIAL = 128;

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const variant = byDtype(cuda, new URL('./cuda.cu', import.meta.url), ['DTYPE']);
  return {
    gate_forward: (logits, gates, rows, softmax, temperature) =>
      variant(logits!).launch('gate_forward', strided(cuda, rows), logits, gates, rows, softmax, f32(temperature)),
    gate_backward: (gates, dGates, dLogits, rows, softmax, temperature, accumulate) =>
      variant(dLogits!).launch(
        'gate_backward',
        strided(cuda, rows),
        ...[gates, dGates, dLogits, rows, softmax, f32(temperature), accumulate],
      ),
    gate_columns_forward: (fused, bias, gates, tokens, heads, width, column, softmax, temperature) =>
      variant(fused!).launch(
        'gate_columns_forward',
        strided(cuda, tokens * heads),
        ...[fused, bias, gates, tokens, heads, width, column, softmax, f32(temperature)],
      ),
    gate_columns_backward: (
      ...[
        gates,
        dGates,
        dFused,
        dBias,
        tokens,
        heads,
        width,
        column,
        softmax,
        temperature,
        accumulate,
        accumulateBias,
        largest,
      ]
    ) => {
      const partials = Math.ceil(tokens / TOKENS_PER_PARTIAL);
      const code = variant(dFused!);
      cuda.withScratch(4 * partials * 3 * heads, (partial) => {
        code.launch(
          'gate_columns_backward',
          { grid: partials, block: 256 },
          ...[gates, dGates, dFused, dBias && partial, tokens, heads, width, column],
          ...[softmax, f32(temperature), accumulate, largest],
        );
        if (dBias)
          code.launch('gate_bias', partialSums(3 * heads), partial, partials, dBias, 3 * heads, accumulateBias);
      });
    },
    gate_constant: (gates, rows, cmp, sel, win) =>
      variant(gates!).launch('gate_constant', strided(cuda, rows), gates, rows, f32(cmp), f32(sel), f32(win)),
    gate_sums: (gates, partial, sums, rows) => {
      const partials = Math.ceil(rows / ROWS_PER_PARTIAL);
      const code = variant(gates!);
      code.launch('gate_partial', { grid: partials, block: 256 }, gates, partial, rows);
      code.launch('gate_sums', { grid: 1, block: 32 }, partial, partials, sums);
    },
  };
}
