import { aligned, byDtype, wide } from '../../device/cuda/elements.js';
import type { CudaRuntime, LaunchArgument } from '../../device/cuda/runtime.js';
import { f32 } from '../../device/cuda/runtime.js';
import type { Addressable, Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

type Split = Parameters<Kernels<typeof signatures>['rope_split']>;

/** Tokens that a block takes at a time, fewer where their cosines would not fit into the shared memory. */
const TILE = 8;
const SHARED_BYTES = 40 * 1024;
const BLOCK = 256;
/** Blocks that a multiprocessor runs at once (cuda.cu has the same). */
const RESIDENT = 3;

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const source = new URL('./cuda.cu', import.meta.url);
  const single = byDtype(cuda, source, ['DTYPE'], { VECTOR: 1 });
  const wideF32 = byDtype(cuda, source, ['DTYPE'], { VECTOR: 4 });
  const wideBf16 = byDtype(cuda, source, ['DTYPE'], { VECTOR: 8 });

  function launch(name: string, values: Split, ...more: LaunchArgument[]): void {
    const [fused, offsets, starts, ...rest] = values;
    const [parts, shapes] = [rest.slice(0, 8) as (Addressable | null)[], rest.slice(8, 16) as number[]];
    const [column, sequences, tokens, width] = rest.slice(16, 20) as number[];
    const frequencies = rest[20] as Addressable | null;
    const [scale, amplitude, stride, start] = rest.slice(21) as number[];
    if (fused === null || tokens === 0) return;
    const split = shapes.map((shape) => ({ size: Math.floor(shape / 2 ** 20) % 2 ** 20, rotate: shape >= 2 ** 40 }));
    const vector = wide(fused);
    const fits = (size: number) => size % vector === 0;
    const isWide =
      fits(width) &&
      fits(column) &&
      split.every(({ size, rotate }) => fits(rotate ? size / 2 : size)) &&
      aligned(fused, ...parts);
    const code = (isWide ? (vector === 8 ? wideBf16 : wideF32) : single)(fused);
    const halves = (split.find(({ rotate }) => rotate)?.size ?? 0) / 2;
    const tile = Math.max(1, Math.min(TILE, Math.floor(SHARED_BYTES / Math.max(1, 8 * halves))));
    code.launch(
      name,
      {
        grid: Math.min(Math.ceil(tokens / tile), cuda.multiprocessors * RESIDENT),
        block: BLOCK,
        shared: 8 * tile * halves,
      },
      ...[fused, offsets, starts, ...parts, ...shapes],
      ...[
        column,
        sequences,
        tokens,
        width,
        frequencies,
        f32(scale),
        f32(amplitude),
        stride,
        start,
        halves,
        tile,
        ...more,
      ],
    );
  }
  return {
    rope_split: (...values) => launch('rope_split', values),
    rope_merge: (...values) => {
      const [accumulate, largest] = values.slice(-2) as [number, Addressable | null];
      launch('rope_merge', values.slice(0, -2) as Split, accumulate, largest);
    },
  };
}
