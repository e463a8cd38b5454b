/** All commands. A new one is a line here and a file that exports `configure` (command.ts). */
import type { CommandEntry } from './command.js';

export const COMMANDS: readonly CommandEntry[] = [
  { name: 'start', summary: 'train a first small model and see what it learned', load: () => import('./start.js') },
  { name: 'train', summary: 'train a model from a config', load: () => import('./train.js') },
  { name: 'launch', summary: 'start the ranks of a training on this machine', load: () => import('./launch.js') },
  { name: 'generate', summary: 'text from a trained model', load: () => import('./generate.js') },
  { name: 'eval', summary: 'how good a trained model is', load: () => import('./eval.js') },
  { name: 'bench', summary: 'measure speed on this machine', load: () => import('./bench.js') },
  {
    name: 'verify',
    summary: 'check the mathematics on this machine: causality, gradients, equality with the reference',
    load: () => import('./verify.js'),
  },
  { name: 'data', summary: 'try, stage, prepare and look at training data', load: () => import('./data.js') },
  { name: 'attend', summary: 'run one attention case from a safetensors file', load: () => import('./attend.js') },
  { name: 'doctor', summary: 'check this machine and a config before a run', load: () => import('./doctor.js') },
  {
    name: 'plan',
    summary: 'step time, memory and tokens per day on many GPUs, on paper',
    load: () => import('./plan.js'),
  },
  { name: 'status', summary: 'how far runs are', load: () => import('./status.js') },
  { name: 'watch', summary: 'watch a run: stalls, collapse, NaN; may halt it', load: () => import('./watch.js') },
  { name: 'health', summary: 'one look at a run, for cron', load: () => import('./health.js') },
  { name: 'check', summary: 'check what a run has done; compare with a baseline', load: () => import('./check.js') },
  { name: 'halt', summary: 'end a run gracefully and wait for it', load: () => import('./halt.js') },
  { name: 'backup', summary: 'write a run into an archive', load: () => import('./backup.js') },
  { name: 'report', summary: 'a report of one or several runs, with plots', load: () => import('./report.js') },
];

/** Commands of `trefoil bench`. */
export const BENCHES: readonly CommandEntry[] = [
  {
    name: 'attention',
    summary: 'sparse and dense attention by length, and the peak they are measured against',
    load: () => import('./bench/attention.js'),
  },
  {
    name: 'train',
    summary: 'whole training steps: tokens per second, share of the peak, and where the time goes',
    load: () => import('./bench/train.js'),
  },
  {
    name: 'decode',
    summary: 'one token by context length on the decode cache, branch by branch, dense beside it',
    load: () => import('./bench/decode.js'),
  },
  {
    name: 'prefill',
    summary: 'whole prompts by length, branch by branch, dense beside them',
    load: () => import('./bench/prefill.js'),
  },
  {
    name: 'data',
    summary: 'prepared shards, tokenising from Parquet, and how long a trainer would wait',
    load: () => import('./bench/data.js'),
  },
];

/** Commands of `trefoil eval`. */
export const EVALUATIONS: readonly CommandEntry[] = [
  { name: 'loss', summary: 'loss and perplexity on a source', load: () => import('./eval/loss.js') },
  {
    name: 'needle',
    summary: 'whether a model finds what is hidden in its context, by depth and length, with a chart',
    load: () => import('./eval/needle.js'),
  },
  {
    name: 'selection',
    summary: 'which blocks a model selects and how it weighs its branches, with pictures',
    load: () => import('./eval/selection.js'),
  },
];

/** Commands of `trefoil data`. */
export const DATA_COMMANDS: readonly CommandEntry[] = [
  { name: 'smoke', summary: 'fetch a first batch within a time limit', load: () => import('./data/smoke.js') },
  {
    name: 'bootstrap',
    summary: 'stage some gigabytes of a source as local JSON Lines',
    load: () => import('./data/bootstrap.js'),
  },
  {
    name: 'prepare',
    summary: 'tokenise a source to shards that are read by position',
    load: () => import('./data/prepare.js'),
  },
  {
    name: 'inspect',
    summary: 'documents, tokens, lengths and samples of a source',
    load: () => import('./data/inspect.js'),
  },
];
