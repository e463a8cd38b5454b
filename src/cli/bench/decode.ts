/** `trefoil bench decode`: measures one decoding step by context length, sparse and dense. */
import { benchDecode } from '../../bench/decode.js';
import { cacheBench } from './cache-bench.js';

export const configure = cacheBench({
  lengths: [1024, 4096, 16_384, 32_768],
  gpuLengths: [4096, 16_384, 65_536],
  quickLengths: [256, 1024],
  runs: 15,
  columns: [
    ...(['S', 'batch', 'ms_total', 'ms_cmp', 'ms_sel', 'ms_win', 'ms_dense'] as const),
    ...(['reads_measured', 'reads_predicted', 'tokens_per_s'] as const),
  ],
  titles: ['S', 'batch', 'total ms', 'cmp', 'sel', 'win', 'dense ms', 'reads', 'predicted', 'tok/s'],
  help: `
One new token for every sequence of a batch whose cache holds random keys and
values: in fp32 on the CPU; in bf16 on CUDA, replaying a graph. As in greedy
generation the next step is launched before the token is read. total and dense
are medians for the whole model with sparse and dense attention. cmp (with the
selection), sel and win are the branch kernels of all layers; on CUDA each
branch is timed alone, launches included. reads: keys that a token reads per
layer and group, counted and predicted by the formula.
On the CPU the last line is the rate at which the first row reads all weights
(f32) once, beside the rate at which the machine reads memory.
`,
  measure: benchDecode,
});
