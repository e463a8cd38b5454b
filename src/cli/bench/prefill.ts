/** `trefoil bench prefill`: measures reading whole prompts by length, sparse and dense. */
import { benchPrefill } from '../../bench/decode.js';
import { cacheBench } from './cache-bench.js';

export const configure = cacheBench({
  lengths: [512, 1024, 2048, 4096],
  gpuLengths: [4096, 16_384, 65_536],
  quickLengths: [128, 256],
  runs: 3,
  columns: ['S', 'batch', 'ms_total', 'ms_cmp', 'ms_sel', 'ms_win', 'ms_dense', 'tokens_per_s'],
  titles: ['S', 'batch', 'total ms', 'cmp', 'sel', 'win', 'dense ms', 'tok/s'],
  help: `
Prompts read into an empty cache, in fp32 on the CPU and in bf16 on CUDA. total
and dense are medians for the whole model with sparse and dense attention; cmp
(with the selection), sel and win are the branch kernels of all layers.
`,
  measure: benchPrefill,
});
