/** `trefoil bench prefill`: measures reading whole prompts by length, sparse and dense. */
import { benchPrefill } from '../../bench/decode.js';
import { cacheBench } from './cache-bench.js';

export const configure = cacheBench({
  lengths: [512, 1024, 2048, 4096],
  gpuLengths: [4096, 16_384, 65_536],
  quickLengths: [128, 256],
  runs: 3,
  columns: ['S', 'batch', 'kernel', 'ran', 'ms_total', 'ms_cmp', 'ms_sel', 'ms_win', 'ms_dense', 'tokens_per_s'],
  choosesKernel: true,
  titles: ['S', 'batch', 'kernel', 'ran', 'total ms', 'cmp', 'sel', 'win', 'dense ms', 'tok/s'],
  help: `
Prompts read into an empty cache, in fp32 on the CPU and in bf16 on CUDA. total
and dense are medians for the whole model with sparse and dense attention; cmp
(with the selection), sel and win are the branch kernels of all layers.
kernel is the kernel of the selected branch that was asked for, by --kernel or
NSA_SEL_RANGES_V2, and ran the one that ran: adaptive is v2 from 1024 tokens on
(NSA_SEL_RANGES_V2_MIN_S), fused kernels compute all branches. NSA_USE_FA2 and
NSA_FORCE_PARITY act too.

Example:
  trefoil bench prefill --kernel v1,v2,adaptive --seq-len 512,1024,2048
On the CPU the last line is the rate at which the first row reads all weights
(f32) once, beside the rate at which the machine reads memory.
`,
  measure: benchPrefill,
});
