/** The flags of `train`: a table, and the reader of a command line by that table. It knows no command-line library. */
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
  /** What stands for the value in the help; null for a switch. */
  value: string | null;
  /** The config key it sets; null for flags that steer the command. */
  key: string | null;
  /** What a switch sets its key to. */
  sets?: boolean;
  meaning: string;
}

export const trainFlags: readonly TrainFlag[] = [
  { name: 'config', value: 'name|file', key: null, meaning: 'shipped config or YAML file (also env CONFIG)' },
  { name: 'dataset', value: 'source', key: 'data.source', meaning: 'where documents come from' },
  { name: 'local-path', value: 'path', key: 'data.path', meaning: 'file, folder or glob of a local source' },
  { name: 'steps', value: 'n', key: 'train.steps', meaning: 'optimizer steps' },
  { name: 'seq-len', value: 'n', key: 'train.seq_len', meaning: 'tokens in a sequence' },
  { name: 'batch-size', value: 'n', key: 'train.batch_size', meaning: 'sequences in a micro-batch' },
  { name: 'accum-batches', value: 'n', key: 'train.accumulate_grad_batches', meaning: 'micro-batches in a step' },
  { name: 'precision', value: 'type', key: 'runtime.precision', meaning: 'fp32 or bf16' },
  { name: 'device', value: 'device', key: 'runtime.device', meaning: 'auto, cpu or cuda' },
  { name: 'out-dir', value: 'folder', key: 'train.out_dir', meaning: 'folder of the run' },
  { name: 'save', value: 'file', key: null, meaning: 'also write the final model to this file' },
  { name: 'resume', value: 'auto|checkpoint', key: null, meaning: 'go on from the newest or the named checkpoint' },
  { name: 'resume-from', value: 'auto|checkpoint', key: null, meaning: 'the same as --resume' },
  {
    name: 'no-gc',
    value: null,
    key: 'runtime.gradient_checkpointing',
    sets: false,
    meaning: 'no gradient checkpointing',
  },
  {
    name: 'loader-timeout',
    value: 'seconds',
    key: 'data.loader_timeout',
    meaning: 'time after which a source that gives nothing is dead',
  },
  { name: 'fwe-report-docs', value: 'n', key: 'data.report_docs', meaning: 'print progress every n documents' },
  {
    name: 'synthetic-on-fail',
    value: null,
    key: 'data.synthetic_on_fail',
    sets: true,
    meaning: 'train on synthetic tokens when the source gives up',
  },
  {
    name: 'ddp',
    value: '-1|0|1',
    key: 'train.ddp',
    meaning: 'several ranks: 1 yes, 0 no, -1 when a launcher started several',
  },
  { name: 'set', value: 'key=value', key: null, meaning: 'set any config key; may be repeated' },
  { name: 'print-config', value: null, key: null, meaning: 'show every value and where it came from, then stop' },
  { name: 'json', value: null, key: null, meaning: 'print results as JSON' },
  { name: 'help', value: null, key: null, meaning: 'show this help' },
];

export interface TrainCommandLine {
  /** The keys that flags set. */
  layer: Layer;
  config: string | null;
  resume: string | null;
  save: string | null;
  printConfig: boolean;
  json: boolean;
  help: boolean;
}

const flagNames = trainFlags.map((flag) => `--${flag.name}`);

/** A text as the value of a key, YAML's way; a text key takes the text as it is, so that a path named 123 stays a path. */
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

/** Reads a command line (without node and script); unknown flags, missing values and stray words are errors. */
export function parseTrainFlags(argv: readonly string[]): TrainCommandLine {
  const options = {
    ...Object.fromEntries(
      trainFlags.map((flag) => [flag.name, { type: flag.value === null ? 'boolean' : 'string' } as const]),
    ),
    help: { type: 'boolean', short: 'h' } as const,
  };
  const { tokens } = parseArgs({ args: [...argv], options, strict: false, allowPositionals: true, tokens: true });
  const layer = new LayerBuilder();
  const words = new Map<string, string>();
  const switches = new Set<string>();
  for (const token of tokens) {
    if (token.kind === 'option-terminator') continue;
    if (token.kind === 'positional')
      throw new UsageError(`${token.value}: unexpected argument${hint(`--${token.value}`, flagNames)}`);
    const flag = trainFlags.find((row) => row.name === token.name);
    if (flag === undefined) {
      throw new UsageError(`${token.rawName}: unknown flag${hint(token.rawName, flagNames)}; see train --help`);
    }
    if (flag.value === null) {
      if (token.value !== undefined) throw new UsageError(`--${flag.name}: takes no value`);
      if (flag.key === null) switches.add(flag.name);
      else layer.set(flag.key, flag.sets, `flag --${flag.name}`);
      continue;
    }
    // parseArgs is greedy: in `--steps --json` the second flag would be the value.
    if (token.value === undefined || token.value === '' || (!token.inlineValue && token.value.startsWith('--'))) {
      throw new UsageError(`--${flag.name}: value missing; give <${flag.value}>`);
    }
    if (flag.name === 'set') applySet(layer, token.value);
    else if (flag.key === null) words.set(flag.name === 'resume-from' ? 'resume' : flag.name, token.value);
    else layer.set(flag.key, typed(token.value, findKey(flag.key), `--${flag.name}`), `flag --${flag.name}`);
  }
  return {
    layer: layer.build(),
    config: words.get('config') ?? null,
    resume: words.get('resume') ?? null,
    save: words.get('save') ?? null,
    printConfig: switches.has('print-config'),
    json: switches.has('json'),
    help: switches.has('help'),
  };
}

/** The flags as lines of a help page. */
export function trainFlagHelp(): string {
  const rows = trainFlags.map((flag) => {
    const choices = flag.key === null ? [] : (findKey(flag.key)?.choices ?? []);
    const value = choices.length > 0 ? choices.join('|') : flag.value;
    return [`--${flag.name}${flag.value === null ? '' : ` <${value}>`}`, flag.meaning];
  });
  // The one long flag (--dataset with its sources) does not push the column of meanings out.
  const width = 30;
  return rows
    .map(([left, right]) =>
      left.length > width ? `  ${left}\n${' '.repeat(width + 4)}${right}` : `  ${left.padEnd(width)}  ${right}`,
    )
    .join('\n');
}
