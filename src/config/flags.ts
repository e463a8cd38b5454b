/** The flags of `train`: a table, and a parser that reads a command line by it. Independent of the command-line library. */
import { parseArgs } from 'node:util';
import { parse as parseYaml } from 'yaml';
import { UsageError } from '../errors.js';
import { type ConfigKey, findKey } from './keys.js';
import { type Layer, LayerBuilder } from './layer.js';
import { show } from './parse.js';
import { hint } from './suggest.js';

export interface TrainFlag {
  /** Without the dashes. */
  name: string;
  /** Placeholder of the value in the help; null for a switch. */
  value: string | null;
  /** The config key it sets; null for flags of the command itself. */
  key: string | null;
  /** The value that a switch gives its key. */
  sets?: boolean;
  meaning: string;
}

const flag = (name: string, value: string | null, key: string | null, meaning: string, sets?: boolean): TrainFlag => ({
  name,
  value,
  key,
  meaning,
  ...(sets !== undefined && { sets }),
});

/** By the headings of `train --help`. */
export const trainFlagGroups: Readonly<Record<string, readonly TrainFlag[]>> = {
  Config: [
    flag('config', 'name|file', null, 'shipped config (see trefoil configs) or YAML file'),
    flag('set', 'key=value', null, 'set any config key, such as model.dim=256; repeatable'),
    flag('print-config', null, null, 'print every config value and where it came from, then exit'),
  ],
  Data: [
    flag('dataset', 'source', 'data.source', 'where documents come from'),
    flag('local-path', 'path', 'data.path', 'file, folder or glob of a local source'),
    flag('tokenizer', 'name|file', 'data.tokenizer', 'byte, gpt2, stories or the path of a tokenizer.json'),
    flag('loader-timeout', 'seconds', 'data.loader_timeout', 'give up on a source that yields nothing for this long'),
    flag('fwe-report-docs', 'n', 'data.report_docs', 'print progress every n documents'),
    flag('synthetic-on-fail', null, 'data.synthetic_on_fail', 'train on synthetic tokens if the source fails', true),
  ],
  Training: [
    flag('steps', 'n', 'train.steps', 'optimizer steps'),
    flag('seq-len', 'n', 'train.seq_len', 'tokens per sequence'),
    flag('batch-size', 'n', 'train.batch_size', 'sequences per micro-batch'),
    flag('accum-batches', 'n', 'train.accumulate_grad_batches', 'micro-batches per optimizer step'),
    flag('lr', 'rate', 'train.lr', 'peak learning rate'),
    flag('seed', 'n', 'train.seed', 'seed of the weights and the data order'),
    flag('no-gc', null, 'runtime.gradient_checkpointing', 'disable gradient checkpointing', false),
  ],
  Machine: [
    flag('device', 'device', 'runtime.device', 'where to compute'),
    flag('precision', 'type', 'runtime.precision', 'type of activations and matrix products'),
    flag('threads', 'n', 'runtime.threads', 'CPU threads (default: all cores)'),
    flag('ddp', '-1|0|1', 'train.ddp', 'several ranks: 1 yes, 0 no, -1 if a launcher started several'),
  ],
  Output: [
    flag('out-dir', 'folder', 'train.out_dir', 'folder of the run'),
    flag('resume', 'auto|checkpoint', null, 'continue from the newest checkpoint in --out-dir, or from the one given'),
    flag('resume-from', 'auto|checkpoint', null, 'same as --resume'),
    flag('save', 'file', null, 'also write the final model to this file'),
    flag('dashboard', null, null, 'serve the dashboard of the run in another process and print its address'),
    flag('json', null, null, 'print the result as one JSON value on stdout, everything else on stderr'),
    flag('help', null, null, 'print this help'),
  ],
};

export const trainFlags: readonly TrainFlag[] = Object.values(trainFlagGroups).flat();

export interface TrainCommandLine {
  /** The keys that flags set. */
  layer: Layer;
  config: string | null;
  resume: string | null;
  save: string | null;
  printConfig: boolean;
  /** Whether to start the dashboard beside the training. */
  dashboard: boolean;
  json: boolean;
  help: boolean;
}

const flagNames = trainFlags.map(({ name }) => `--${name}`);

/** Parses a text as YAML. Keys that hold text take it unparsed, so that a path named 123 remains a path. */
function typed(text: string, key: ConfigKey | undefined, flag: string): unknown {
  if (key?.kind === 'text') return key.nullable && text === 'null' ? null : text;
  let value: unknown;
  try {
    value = parseYaml(text, { logLevel: 'error' });
  } catch (error) {
    throw new UsageError(`${flag} ${show(text)}: not a YAML value (${(error as Error).message.split('\n')[0]})`);
  }
  if (key?.kind === 'boolean' && (value === 0 || value === 1)) return value === 1;
  return value;
}

function applySet(layer: LayerBuilder, text: string): void {
  const equals = text.indexOf('=');
  if (equals < 1) throw new UsageError(`--set ${show(text)}: give key=value, such as --set train.lr=3e-4`);
  const path = text.slice(0, equals).trim();
  const value = typed(text.slice(equals + 1), findKey(path), `--set ${path}`);
  layer.set(path, value, 'flag --set', `flag --set ${path}`);
}

/** Parses a command line (without node and script). Unknown flags, missing values and extra arguments are errors. */
export function parseTrainFlags(argv: readonly string[]): TrainCommandLine {
  const options = {
    ...Object.fromEntries(
      trainFlags.map(({ name, value }) => [name, { type: value === null ? 'boolean' : 'string' } as const]),
    ),
    help: { type: 'boolean', short: 'h' } as const,
  };
  const { tokens } = parseArgs({ args: [...argv], options, strict: false, allowPositionals: true, tokens: true });
  const layer = new LayerBuilder();
  const values = new Map<string, string>();
  const switches = new Set<string>();
  for (const token of tokens) {
    if (token.kind === 'option-terminator') continue;
    if (token.kind === 'positional')
      throw new UsageError(`${token.value}: unexpected argument${hint(`--${token.value}`, flagNames)}`);
    const found = trainFlags.find((row) => row.name === token.name);
    if (found === undefined) {
      throw new UsageError(`${token.rawName}: unknown flag${hint(token.rawName, flagNames)}; see train --help`);
    }
    if (found.value === null) {
      if (token.value !== undefined) throw new UsageError(`--${found.name}: takes no value`);
      if (found.key === null) switches.add(found.name);
      else layer.set(found.key, found.sets, `flag --${found.name}`);
      continue;
    }
    // parseArgs is greedy: in `--steps --json` the second flag would be the value.
    if (token.value === undefined || token.value === '' || (!token.inlineValue && token.value.startsWith('--'))) {
      throw new UsageError(`--${found.name}: value missing; give <${found.value}>`);
    }
    if (found.name === 'set') applySet(layer, token.value);
    else if (found.key === null) values.set(found.name === 'resume-from' ? 'resume' : found.name, token.value);
    else layer.set(found.key, typed(token.value, findKey(found.key), `--${found.name}`), `flag --${found.name}`);
  }
  return {
    layer: layer.build(),
    config: values.get('config') ?? null,
    resume: values.get('resume') ?? null,
    save: values.get('save') ?? null,
    printConfig: switches.has('print-config'),
    dashboard: switches.has('dashboard'),
    json: switches.has('json'),
    help: switches.has('help'),
  };
}

/** Longer lists of choices go into the meaning, so that a help page keeps its first column. */
const LONGEST_PLACEHOLDER = 40;

/** The flag with its placeholder, and its meaning with the default: two columns of a help page. */
export function trainFlagRow({ name, value, key, meaning }: TrainFlag): [flag: string, meaning: string] {
  if (value === null) return [`--${name}`, meaning];
  const known = key === null ? undefined : findKey(key);
  const choices = known?.choices ?? [];
  const isShort = choices.join('|').length <= LONGEST_PLACEHOLDER;
  const placeholder = (isShort && choices.join('|')) || value;
  const explained = isShort ? meaning : `${meaning}: ${choices.join(', ')}`;
  const isGiven = known === undefined || known.default === null || meaning.includes('(default');
  return [`--${name} <${placeholder}>`, isGiven ? explained : `${explained} (default: ${known.default})`];
}
