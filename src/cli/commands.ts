/**
 * All commands, in the order and groups of `trefoil --help`. A command is a line here and a module that exports
 * `configure`; the module is imported only when the command is used.
 */
import type { Command } from 'commander';
import type { Io } from './shared/io.js';

interface CommandName {
  readonly name: string;
  /** One line for the list of commands. */
  readonly summary: string;
  /** Stops something: no error suggests it for a misspelled command. */
  readonly stops?: true;
}

/** A command with a module of its own. */
export interface SingleCommand extends CommandName {
  load(): Promise<CommandModule>;
}

/** A command with subcommands, such as `trefoil bench attention`. */
export interface CommandGroup extends CommandName {
  readonly commands: readonly SingleCommand[];
}

export type CommandEntry = (SingleCommand | CommandGroup) & {
  /** Heading in `trefoil --help`. */
  readonly heading?: string;
};

/** Declares options and an action on commander's command. */
export interface CommandModule {
  /**
   * The action prints on `io`, throws a TrefoilError for an error that the user can fix, and sets `io.exitCode` when
   * the work is done but the result is negative.
   */
  configure(command: Command, io: Io): void;
}

/** Commands of `trefoil bench`. */
export const BENCHES: readonly SingleCommand[] = [
  {
    name: 'attention',
    summary: 'sparse and dense attention by sequence length, relative to the measured peak',
    load: () => import('./bench/attention.js'),
  },
  {
    name: 'train',
    summary: 'training steps: tokens per second, MFU, time per kernel',
    load: () => import('./bench/train.js'),
  },
  {
    name: 'decode',
    summary: 'time per generated token by context length, sparse and dense',
    load: () => import('./bench/decode.js'),
  },
  {
    name: 'prefill',
    summary: 'time to read a prompt by length, sparse and dense',
    load: () => import('./bench/prefill.js'),
  },
  {
    name: 'data',
    summary: 'tokenizing and loading speed, and how long a trainer waits for data',
    load: () => import('./bench/data.js'),
  },
  {
    name: 'serve',
    summary: 'a server under load: latencies, throughput, refusals',
    load: () => import('./bench/serve.js'),
  },
];

/** Commands of `trefoil eval`. */
export const EVALUATIONS: readonly SingleCommand[] = [
  { name: 'loss', summary: 'loss and perplexity on a data source', load: () => import('./eval/loss.js') },
  {
    name: 'needle',
    summary: 'retrieval accuracy by depth and context length, with a chart',
    load: () => import('./eval/needle.js'),
  },
  {
    name: 'long',
    summary: 'questions over your own long text, for a model or an OpenAI server',
    load: () => import('./eval/long.js'),
  },
  {
    name: 'selection',
    summary: 'which blocks each token selects and how branches are weighted, with charts',
    load: () => import('./eval/selection.js'),
  },
  { name: 'logits', summary: 'logits of given tokens, as safetensors', load: () => import('./eval/logits.js') },
];

/** Formats of `trefoil import` and `trefoil export`. */
export const IMPORTS: readonly SingleCommand[] = [
  { name: 'hf', summary: 'a folder of Hugging Face transformers', load: () => import('./exchange/import-hf.js') },
];
export const EXPORTS: readonly SingleCommand[] = [
  { name: 'hf', summary: 'a folder that transformers loads', load: () => import('./exchange/export-hf.js') },
];

/** Commands of `trefoil data`. */
export const DATA_COMMANDS: readonly SingleCommand[] = [
  { name: 'smoke', summary: 'fetch a first batch within a time limit', load: () => import('./data/smoke.js') },
  {
    name: 'bootstrap',
    summary: 'download part of a source as local JSON Lines',
    load: () => import('./data/bootstrap.js'),
  },
  {
    name: 'prepare',
    summary: 'tokenize a source into memory-mapped shards',
    load: () => import('./data/prepare.js'),
  },
  {
    name: 'join',
    summary: 'join the parts that several machines have prepared',
    load: () => import('./data/join.js'),
  },
  {
    name: 'tokenizer',
    summary: 'train a tokenizer on text of your own',
    load: () => import('./data/tokenizer.js'),
  },
  {
    name: 'inspect',
    summary: 'documents, tokens, lengths and samples of a source',
    load: () => import('./data/inspect.js'),
  },
  { name: 'cache', summary: 'list and clear tokenized and fetched data', load: () => import('./data/cache.js') },
];

const [START, TRAIN, USE, RUNS, MACHINE] = [
  'Start here:',
  'Train:',
  'Use and evaluate a model:',
  'Watch and manage runs:',
  'Check and measure this machine:',
];

export const COMMANDS: readonly CommandEntry[] = [
  {
    heading: START,
    name: 'start',
    summary: 'train a first small model and see what it learned',
    load: () => import('./start.js'),
  },
  {
    heading: START,
    name: 'configs',
    summary: 'list the shipped configs, or print one',
    load: () => import('./configs.js'),
  },
  {
    heading: START,
    name: 'doctor',
    summary: 'check that this machine and a config are ready for a run',
    load: () => import('./doctor.js'),
  },
  { heading: TRAIN, name: 'train', summary: 'train a model from a config', load: () => import('./train.js') },
  {
    heading: TRAIN,
    name: 'launch',
    summary: 'train with several ranks on this machine',
    load: () => import('./launch.js'),
  },
  {
    heading: TRAIN,
    name: 'data',
    summary: 'test, download, tokenize and inspect training data',
    commands: DATA_COMMANDS,
  },
  {
    heading: TRAIN,
    name: 'plan',
    summary: 'estimate step time, memory and tokens per day on many GPUs',
    load: () => import('./plan.js'),
  },
  {
    heading: USE,
    name: 'generate',
    summary: 'generate text with a trained model',
    load: () => import('./generate.js'),
  },
  {
    heading: USE,
    name: 'chat',
    summary: 'talk to a chat model',
    load: () => import('./chat.js'),
  },
  {
    heading: USE,
    name: 'pull',
    summary: 'download a model of the Hugging Face hub',
    load: () => import('./pull.js'),
  },
  {
    heading: USE,
    name: 'serve',
    summary: 'serve a model over HTTP with the OpenAI API',
    load: () => import('./serve.js'),
  },
  { heading: USE, name: 'eval', summary: 'evaluate a trained model', commands: EVALUATIONS },
  { heading: USE, name: 'import', summary: "bring in another program's model", commands: IMPORTS },
  { heading: USE, name: 'export', summary: 'write a model for another program', commands: EXPORTS },
  {
    heading: USE,
    name: 'convert',
    summary: 'make a dense model sparse',
    load: () => import('./exchange/convert.js'),
  },
  { heading: RUNS, name: 'status', summary: 'progress of runs', load: () => import('./status.js') },
  {
    heading: RUNS,
    name: 'dashboard',
    summary: 'curves, attention health and traces of runs in a browser',
    load: () => import('./dashboard.js'),
  },
  {
    heading: RUNS,
    name: 'watch',
    summary: 'watch a run for stalls, gate collapse and NaN; optionally halt it',
    load: () => import('./watch.js'),
  },
  {
    heading: RUNS,
    name: 'health',
    summary: 'check the health of a run once, for cron',
    load: () => import('./health.js'),
  },
  {
    heading: RUNS,
    name: 'check',
    summary: 'check the results of a run; compare with a baseline',
    load: () => import('./check.js'),
  },
  {
    heading: RUNS,
    name: 'halt',
    stops: true,
    summary: 'stop a run after its step and a checkpoint',
    load: () => import('./halt.js'),
  },
  { heading: RUNS, name: 'backup', summary: 'archive a run as .tar.gz', load: () => import('./backup.js') },
  {
    heading: RUNS,
    name: 'report',
    summary: 'write a report of one or several runs, with plots',
    load: () => import('./report.js'),
  },
  {
    heading: MACHINE,
    name: 'verify',
    summary: 'check causality, gradients and parity with the reference kernels',
    load: () => import('./verify.js'),
  },
  { heading: MACHINE, name: 'bench', summary: 'measure speed', commands: BENCHES },
  {
    heading: MACHINE,
    name: 'attend',
    summary: 'run one attention case from a safetensors file',
    load: () => import('./attend.js'),
  },
];
