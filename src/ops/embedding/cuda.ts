import { byDtype, strided, wide } from '../../device/cuda/elements.js';
import type { CudaRuntime } from '../../device/cuda/runtime.js';
import type { Kernels } from '../../device/device.js';
import type { signatures } from './op.js';

/** Tokens of one block of the sort, and the digits it sorts by (cuda.cu has the same). */
const CHUNK = 2048;
const DIGIT_BITS = 8;
const DIGITS = 2 ** DIGIT_BITS;
const SORT_BLOCK = 256;
const SCAN_BLOCK = 1024;
const SUM_BLOCK = 512;

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const variant = byDtype(cuda, new URL('./cuda.cu', import.meta.url), ['DTYPE']);
  return {
    embedding_forward: (table, ids, y, _firstBad, tokens, vocab, dim) =>
      variant(y!).launch(
        'embedding_forward',
        strided(cuda, Math.ceil((tokens * dim) / wide(y!))),
        ...[table, ids, y, tokens, vocab, dim],
      ),
    embedding_backward: (ids, dy, dTable, tokens, vocab, dim, accumulate) => {
      if (!accumulate) cuda.fillZero(dTable!.pointer, vocab * dim * 4);
      if (tokens === 0 || dim === 0) return;
      const code = variant(dy!);
      const chunks = Math.ceil(tokens / CHUNK);
      const list = 4 * tokens;
      // Two pairs of keys and tokens that the passes of the sort go back and forth between, and the counts.
      cuda.withScratch(4 * list + 4 * DIGITS * chunks, (scratch) => {
        const at = (index: number) => scratch + BigInt(index * list);
        const pairs = [
          { keys: at(0), order: at(1) },
          { keys: at(2), order: at(3) },
        ];
        const counts = at(4);
        let [keys, order]: [bigint, bigint | null] = [ids!.pointer, null];
        // `vocab` itself is the key of ids outside the table.
        const passes = Math.max(1, Math.ceil(Math.log2(vocab + 1) / DIGIT_BITS));
        for (let pass = 0; pass < passes; pass++) {
          const into = pairs[pass % 2];
          const shift = pass * DIGIT_BITS;
          const shape = { grid: chunks, block: SORT_BLOCK };
          code.launch('sort_count', shape, keys, counts, tokens, vocab, shift);
          code.launch('sort_scan', { grid: 1, block: SCAN_BLOCK }, counts, DIGITS * chunks);
          code.launch('sort_scatter', shape, keys, order, into.keys, into.order, counts, tokens, vocab, shift);
          [keys, order] = [into.keys, into.order];
        }
        code.launch(
          'embedding_backward',
          { grid: tokens, block: SUM_BLOCK },
          ...[keys, order, dy, dTable, tokens, vocab, dim],
        );
      });
    },
  };
}
