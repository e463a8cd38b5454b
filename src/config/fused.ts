/** Which attention kernels compute a branch: the fused ones or the branch kernels (one kernel per branch). */
import type { Config } from './schema.js';

/** The branch switch overrides the global one; a threshold of -1 and force_parity override both. */
export function useFusedAttention(runtime: Config['runtime'], branch: 'win' | 'cmp', length: number): boolean {
  if (runtime.force_parity) return false;
  const [switched, least] =
    branch === 'win' ? [runtime.use_fa2_win, runtime.fa2_min_len_win] : [runtime.use_fa2_cmp, runtime.fa2_min_len_cmp];
  return (switched ?? runtime.use_fa2) && least >= 0 && length >= least;
}
