/** The flags of `train`: a table, and what their values set. */
import { parse as parseYaml } from 'yaml';
import { UsageError } from '../errors.js';
import { show } from './check.js';
import { type ConfigKey, findKey } from './keys.js';
import { type Layer, LayerBuilder } from './layer.js';
import type { Config } from './schema.js';

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
    flag('from', 'model', 'train.init_from', 'start from the weights, shape and tokenizer of this model'),
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
    flag('save', 'path', null, 'also write the final model to this .safetensors file or folder'),
    flag('dashboard', null, null, 'serve the dashboard of the run in another process and print its address'),
    flag('json', null, null, 'print the result as one JSON value on stdout, everything else on stderr'),
  ],
};

export const trainFlags: readonly TrainFlag[] = Object.values(trainFlagGroups).flat();

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

/** Collects what flags set, in the order in which they are given. */
export class FlagSettings {
  readonly #layer = new LayerBuilder();

  /** `--name text`; null for a switch. Flags of the command itself set nothing. */
  add(name: string, text: string | null): this {
    const flag = trainFlags.find((row) => row.name === name);
    // A parser takes the next word as the value, whatever it is: in `--steps --json` a flag.
    if (flag?.value != null && (text === null || text === '' || text.startsWith('--')))
      throw new UsageError(`--${name}: value missing; give <${flag.value}>`);
    if (name === 'set') this.set(text ?? '');
    else if (flag?.key != null)
      this.#layer.set(
        flag.key,
        flag.value === null ? flag.sets : typed(text ?? '', findKey(flag.key), `--${name}`),
        `flag --${name}`,
      );
    return this;
  }

  /** `--set key=value` for each text. */
  set(...texts: readonly string[]): this {
    for (const text of texts) {
      const equals = text.indexOf('=');
      if (equals < 1) throw new UsageError(`--set ${show(text)}: give key=value, such as --set train.lr=3e-4`);
      const path = text.slice(0, equals).trim();
      const value = typed(text.slice(equals + 1), findKey(path), `--set ${path}`);
      this.#layer.set(path, value, 'flag --set', `flag --set ${path}`);
    }
    return this;
  }

  get layer(): Layer {
    return this.#layer.build();
  }
}

/** Longer lists of choices go into the meaning, so that a help page keeps its first column. */
const LONGEST_PLACEHOLDER = 40;

/** The flag with its placeholder, and its meaning with the default: two columns of a help page. */
export function trainFlagRow(
  { name, value, key, meaning }: TrainFlag,
  config: Config | null = null,
): [flag: string, meaning: string] {
  if (value === null) return [`--${name}`, meaning];
  const known = key === null ? undefined : findKey(key);
  const otherwise = key !== null && config ? valueAt(config, key) : known?.default;
  const choices = known?.choices ?? [];
  const isShort = choices.join('|').length <= LONGEST_PLACEHOLDER;
  const placeholder = (isShort && choices.join('|')) || value;
  const explained = isShort ? meaning : `${meaning}: ${choices.join(', ')}`;
  const isGiven = known === undefined || otherwise === null || meaning.includes('(default');
  return [`--${name} <${placeholder}>`, isGiven ? explained : `${explained} (default: ${otherwise})`];
}

function valueAt(config: Config, path: string): unknown {
  const [section, name] = path.split('.');
  return (config[section as keyof Config] as Readonly<Record<string, unknown>>)[name];
}
