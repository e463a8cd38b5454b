import { byDtype } from '../../../../device/cuda/elements.js';
import type { CudaRuntime, LaunchArgument, LaunchShape } from '../../../../device/cuda/runtime.js';
import type { Addressable, Kernels } from '../../../../device/device.js';
import { SELECTION_SIGNATURE } from '../../select/op.js';
import type { signatures } from './op.js';

/** Threads of a block, keys seen at a time and probabilities held at a time (cuda.cu has the same). */
const THREADS = 128;
const CHUNK = 64;
const PROBABILITIES = 4096;
/** Blocks that a multiprocessor runs at once. */
const RESIDENT = 8;

/** Keys of a page of the window and compressed branches: a multiple of the 32 keys that a warp processes at a time. */
export const CUDA_PAGE = 64;

interface Heads {
  readonly heads: number;
  readonly groups: number;
  readonly dk: number;
  readonly dv: number;
}

export function launchers(cuda: CudaRuntime): Kernels<typeof signatures> {
  const variant = byDtype(cuda, new URL('./cuda.cu', import.meta.url), ['DTYPE']);
  /** The host does not know the number of tokens: blocks read it on the device. */
  const everywhere = (shared = 0): LaunchShape => ({ grid: cuda.multiprocessors * RESIDENT, block: THREADS, shared });
  /** Queries, results, and three numbers a row; `more` floats for the scores. */
  const rowBytes = ({ heads, groups, dk, dv }: Heads, more: number) => 4 * ((heads / groups) * (dk + dv + 3) + more);
  function attend(name: string, q: Addressable | null, heads: Heads, values: readonly LaunchArgument[]): void {
    const shared = rowBytes(heads, (heads.heads / heads.groups) * CHUNK);
    variant(q!).launch(name, everywhere(shared), ...values);
  }
  const headsAt = (values: readonly unknown[], at: number): Heads => {
    const [heads, groups, dk, dv] = values.slice(at, at + 4) as number[];
    return { heads, groups, dk, dv };
  };
  return {
    paged_store: (k, ...rest) => variant(k!).launch('paged_store', everywhere(), k, ...rest),
    paged_load: (k, ...rest) => variant(k!).launch('paged_load', everywhere(), k, ...rest),
    paged_join: (x, ...rest) => variant(x!).launch('paged_join', everywhere(), x, ...rest),
    paged_keep: (joined, ...rest) => variant(joined!).launch('paged_keep', everywhere(), joined, ...rest),
    paged_window: (...values) => attend('paged_window', values[0], headsAt(values, 10), values),
    paged_compressed: (q, out, lse, reads, selected, ...where) => {
      const heads = headsAt(where, 6);
      const sparse = where.slice(-SELECTION_SIGNATURE.length) as number[];
      const [l, d, , count] = sparse;
      attend('paged_compressed', q, heads, [q, out, lse, reads, ...where.slice(0, -sparse.length), l, d]);
      const shared = rowBytes(heads, 2 * PROBABILITIES + 2 * count);
      variant(q!).launch('paged_select', everywhere(shared), q, lse, selected, ...where);
    },
    paged_selected: (...values) => attend('paged_selected', values[0], headsAt(values, 11), values),
  };
}
