/** `trefoil bench decode`: one token of a whole model by context length, sparse and dense. */
import type { Command } from 'commander';
import { benchDecode } from '../../bench/decode.js';
import type { Io } from '../shared/io.js';
import { configureCacheBench } from './cache-bench.js';

export function configure(command: Command, io: Io): void {
  configureCacheBench(command, io, {
    lengths: [1024, 4096, 16_384, 32_768],
    gpuLengths: [4096, 16_384, 65_536],
    quickLengths: [256, 1024],
    runs: 15,
    columns: [
      ...(['S', 'batch', 'ms_total', 'ms_cmp', 'ms_sel', 'ms_win', 'ms_dense'] as const),
      ...(['reads_measured', 'reads_predicted', 'tokens_per_s'] as const),
    ],
    help: `
One new token for every sequence of a batch whose cache holds random keys and values: on the CPU in fp32, on CUDA in bf16 by
replaying a graph, the token read by the host. ms_total and ms_dense are steps of the whole model with sparse and with dense
attention, medians; the branches are their kernels in all layers, cmp with the selection (on CUDA each branch alone, launches
included). reads are the keys that a token reads in one layer and group: counted, and by the formula.
`,
    measure: benchDecode,
  });
}
