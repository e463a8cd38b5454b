import { aligned, byDtype, strided, wide } from '../../device/cuda/elements.js';
import type { CudaRuntime } from '../../device/cuda/runtime.js';
import type { Addressable, Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

/** Threads of the block that takes a row, and of the one block that takes all tokens. */
const ROW = 512;
const ALL = 1024;

/** Shared memory of a multiprocessor by compute capability, of which each block costs 1 KiB beside what it asks for. */
const SHARED_KIB: Readonly<Record<number, number>> = {
  80: 164,
  86: 100,
  87: 164,
  89: 100,
  90: 228,
  100: 228,
  103: 228,
};
const FEWEST_KIB = 100;
/** Maximum size of a staging block's other variables. */
const BESIDE_BYTES = 2048;

/** Whether two blocks, each with a row in shared memory, run on a multiprocessor at once. */
function isStaged({ architecture }: CudaRuntime, logits: Addressable, vocab: number): boolean {
  const bytes = 16 * (vocab / wide(logits));
  const room = (1024 * (SHARED_KIB[architecture] ?? FEWEST_KIB)) / 2 - BESIDE_BYTES;
  return Number.isInteger(bytes / 16) && bytes <= room && aligned(logits);
}

/** Whether `crossEntropyCodes` can be used for these logits. */
export function writesCodes(cuda: CudaRuntime, logits: Addressable, vocab: number): boolean {
  return logits.dtype === 'bf16' && vocab % 16 === 0 && isStaged(cuda, logits, vocab);
}

/**
 * Losses of `tokens` rows of bf16 logits, and in place of each row its gradient for a slope of 1 in e5m2: codes in the
 * first half of the row, to be multiplied by `factor` f32 [1], which is written too. No scale has to be found: the
 * gradient is a probability, or one minus it, times 1 / (number of targets).
 */
export function crossEntropyCodes(
  cuda: CudaRuntime,
  rows: Record<'logits' | 'targets' | 'inverseCount' | 'losses' | 'factor', Addressable>,
  tokens: number,
  vocab: number,
): void {
  const { logits, targets, inverseCount, losses, factor } = rows;
  const macros = { DTYPE: 'bf16', DTYPE_INTO: 'bf16', CODES_OF_LOGITS: 1 };
  const code = cuda.compile(new URL('./cuda.cu', import.meta.url), macros);
  const shape = { grid: tokens, block: ROW, shared: 16 * (vocab / wide(logits)) };
  code.launch('crossentropy_codes', shape, logits, targets, inverseCount, losses, factor, vocab);
}

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const variant = byDtype(cuda, new URL('./cuda.cu', import.meta.url), ['DTYPE', 'DTYPE_INTO']);
  return {
    crossentropy_count: (targets, inverseCount, firstBad, tokens, vocab) =>
      variant(inverseCount!, inverseCount!).launch(
        'crossentropy_count',
        { grid: 1, block: ALL },
        ...[targets, inverseCount, firstBad, tokens, vocab],
      ),
    crossentropy_forward: (logits, targets, losses, lse, tokens, vocab) =>
      variant(logits!, logits!).launch(
        'crossentropy_forward',
        { grid: tokens, block: ROW },
        ...[logits, targets, losses, lse, vocab],
      ),
    crossentropy_mean: (losses, inverseCount, loss, tokens) =>
      variant(losses!, losses!).launch(
        'crossentropy_mean',
        { grid: 1, block: ALL },
        ...[losses, inverseCount, loss, tokens],
      ),
    crossentropy_backward: (logits, targets, lse, inverseCount, dLoss, dLogits, tokens, vocab, accumulate) =>
      variant(logits!, logits!).launch(
        'crossentropy_backward',
        { grid: tokens, block: ROW },
        ...[logits, targets, lse, inverseCount, dLoss, dLogits, vocab, accumulate],
      ),
    crossentropy_in_place: (logits, targets, inverseCount, losses, tokens, vocab) => {
      const staged = isStaged(cuda, logits!, vocab);
      variant(logits!, logits!).launch(
        staged ? 'crossentropy_staged' : 'crossentropy_in_place',
        { grid: tokens, block: ROW, shared: staged ? 16 * (vocab / wide(logits!)) : 0 },
        ...[logits, targets, inverseCount, losses, vocab],
      );
    },
    crossentropy_scale: (value, factor, into, count, accumulate) =>
      variant(value!, into!).launch(
        'crossentropy_scale',
        strided(cuda, Math.ceil(count / wide(value!))),
        ...[value, factor, into, count, accumulate],
      ),
  };
}
