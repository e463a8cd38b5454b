import { byDtype } from '../../device/cuda/elements.js';
import { type CudaRuntime, f32 } from '../../device/cuda/runtime.js';
import type { Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

const BLOCK = 256;
const FINAL = 1024;

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const variant = byDtype(cuda, new URL('./cuda.cu', import.meta.url), ['DTYPE']);
  return {
    muon_momentum: (records, pieces, factor, partials, norms, matrices, pieceCount, momentum) => {
      const code = variant({ pointer: 0n, dtype: 'f32' }); // the same for every dtype of the directions
      const shape = { grid: pieceCount, block: BLOCK };
      code.launch('muon_momentum', shape, records, pieces, factor, partials, f32(momentum));
      const all = { grid: Math.ceil(matrices / (FINAL / 32)), block: FINAL };
      code.launch('muon_norms', all, records, partials, norms, matrices);
    },
    muon_direction: (records, pieces, factor, norms, x, firstMatrix, firstPiece, pieceCount, momentum) =>
      variant(x!).launch(
        'muon_direction',
        { grid: pieceCount, block: BLOCK },
        ...[records, pieces, factor, norms, x, firstMatrix, firstPiece, f32(momentum)],
      ),
    muon_update: (records, pieces, scalars, factor, x, firstMatrix, firstPiece, pieceCount) =>
      variant(x!).launch(
        'muon_update',
        { grid: pieceCount, block: BLOCK },
        ...[records, pieces, scalars, factor, x, firstMatrix, firstPiece],
      ),
  };
}
