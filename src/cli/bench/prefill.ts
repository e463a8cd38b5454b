/** `trefoil bench prefill`: whole prompts of a whole model by length, sparse and dense. */
import type { Command } from 'commander';
import { benchPrefill } from '../../bench/decode.js';
import type { Io } from '../shared/io.js';
import { configureCacheBench } from './cache-bench.js';

export function configure(command: Command, io: Io): void {
  configureCacheBench(command, io, {
    lengths: [512, 1024, 2048, 4096],
    gpuLengths: [4096, 16_384, 65_536],
    quickLengths: [128, 256],
    runs: 3,
    columns: ['S', 'batch', 'ms_total', 'ms_cmp', 'ms_sel', 'ms_win', 'ms_dense', 'tokens_per_s'],
    help: `
Prompts read at once into an empty cache, on the CPU in fp32, on CUDA in bf16. ms_total and ms_dense are the whole model with sparse and with dense
attention, medians; the branches are their kernels in all layers, cmp with the selection.
`,
    measure: benchPrefill,
  });
}
