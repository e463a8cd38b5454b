import { byDtype } from '../../device/cuda/elements.js';
import { type CudaRuntime, f32 } from '../../device/cuda/runtime.js';
import type { Kernels } from '../../device/device.js';
import { PIECE } from '../common/tensor-table.js';
import type { signatures } from './op.js';

const BLOCK = 256;

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const code = byDtype(cuda, new URL('./cuda.cu', import.meta.url), []);
  return {
    adamw_step: (value, gradient, m, v, rounded, count, ...numbers) =>
      code().launch(
        'adamw_step',
        { grid: Math.ceil(count / PIECE), block: BLOCK },
        ...[value, gradient, m, v, rounded, count, ...numbers.map(f32)],
      ),
    adamw_factor: (sums, scalars, factor) =>
      code().launch('adamw_factor', { grid: 1, block: 1 }, sums, scalars, factor),
    adamw_step_all: (records, pieces, scalars, factor, pieceCount, ...numbers) =>
      code().launch(
        'adamw_step_all',
        { grid: pieceCount, block: BLOCK },
        ...[records, pieces, scalars, factor, ...numbers.map(f32)],
      ),
  };
}
