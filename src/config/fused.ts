/** Which attention kernels compute a branch: the fused ones or the branch kernels (one kernel per branch). */
import type { Config } from './schema.js';

/** The branch switch over the global one; a threshold of -1 disables whatever the switches say, and so does parity. */
export function useFusedAttention(runtime: Config['runtime'], branch: 'win' | 'cmp', length: number): boolean {
  if (runtime.force_parity) return false;
  const [switched, least] =
    branch === 'win' ? [runtime.use_fa2_win, runtime.fa2_min_len_win] : [runtime.use_fa2_cmp, runtime.fa2_min_len_cmp];
  return (switched ?? runtime.use_fa2) && least >= 0 && length >= least;
}
