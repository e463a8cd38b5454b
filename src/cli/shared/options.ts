/**
 * The options of commands. A command declares them once, as a table by name; the types of the values that its action
 * receives follow from it. Parsers reject bad values with one line.
 */
import { Argument, type Command, InvalidArgumentError, Option } from 'commander';
import type { Io } from './io.js';

/** An option whose value, in the action of a command, has the type `Value`. */
export class Flag<Value> extends Option {
  declare readonly value: Value; // never set: it only carries the type
}

/** The value of `--name <text>`, `--name <text...>`, `--no-name` or the switch `--name`. */
type ValueOf<Text extends string> = Text extends `--no-${string}`
  ? boolean
  : Text extends `${string}<${string}...>`
    ? string[] | undefined
    : Text extends `${string}<${string}`
      ? string | undefined
      : boolean | undefined;

export function flag<Text extends string>(text: Text, meaning: string): Flag<ValueOf<Text>> {
  return new Flag(text, meaning);
}

export function required<Text extends string>(text: Text, meaning: string): Flag<NonNullable<ValueOf<Text>>> {
  return new Flag<NonNullable<ValueOf<Text>>>(text, meaning).makeOptionMandatory();
}

/** An option with a parser, and a default if one is given; `shown` is the default as the help shows it. */
export function parsed<Value>(text: string, meaning: string, parse: (text: string) => Value): Flag<Value | undefined>;
export function parsed<Value>(
  text: string,
  meaning: string,
  parse: (text: string) => Value,
  otherwise: NoInfer<Value>,
  shown?: string,
): Flag<Value>;
export function parsed(
  text: string,
  meaning: string,
  parse: (text: string) => unknown,
  otherwise?: unknown,
  shown?: string,
): Flag<unknown> {
  return new Flag(text, meaning).argParser((value) => parse(value)).default(otherwise, shown);
}

export function choice<Name extends string>(
  text: string,
  meaning: string,
  names: readonly Name[],
): Flag<Name | undefined>;
export function choice<Name extends string>(
  text: string,
  meaning: string,
  names: readonly Name[],
  otherwise: NoInfer<Name>,
): Flag<Name>;
export function choice(text: string, meaning: string, names: readonly string[], otherwise?: string): Flag<unknown> {
  return new Flag(text, meaning).choices(names).default(otherwise);
}

/** An option that may be given several times: all its values. */
export function repeated(text: string, meaning: string): Flag<string[] | undefined> {
  return new Flag<string[] | undefined>(text, meaning).argParser((one, all: string[] = []) => [...all, one]);
}

/** An option that names models: before the command runs, those of the hub are downloaded (`pullNamedModels`). */
export class ModelFlag<Value> extends Flag<Value> {}

/** An argument that names a model, as `ModelFlag`. */
export class ModelArgument extends Argument {}

/** The model that a command reads. */
export function modelOption(): Flag<string> {
  return new ModelFlag<string>('--model <path>', MODEL_PATH).makeOptionMandatory();
}

/** A model that a command can do without. */
export function modelFlag<Text extends string>(text: Text, meaning: string): Flag<ValueOf<Text>> {
  return new ModelFlag(text, meaning);
}

/** An adapter that is added to the weights of the model. */
export function adapterOption(): Flag<string | undefined> {
  return flag('--adapter <folder>', "LoRA adapter in PEFT's format, added to the weights");
}

/** In what type the CPU holds the weights of the model that a command reads. */
export function weightsOption(): Flag<'file' | 'int8'> {
  return choice(
    '--weights <type>',
    'weights on the CPU: of the type in the file, or in 8 bits',
    ['file', 'int8'],
    'file',
  );
}

export const MODEL_PATH = 'run folder, checkpoint, model.safetensors, Hugging Face folder, or hf:owner/name';

type Optional<Flags> = { [Name in keyof Flags]: Flags[Name] extends Flag<infer Value> ? Value : never };

/** The values that the action of a command with these options receives. */
export type OptionValues<Flags, Values = Optional<Flags>> = {
  readonly [Name in keyof Values as undefined extends Values[Name] ? never : Name]: Values[Name];
} & {
  readonly [Name in keyof Values as undefined extends Values[Name] ? Name : never]?: Exclude<Values[Name], undefined>;
};

/** Adds the options to a command, in the order of the table. */
export function addOptions(command: Command, flags: Readonly<Record<string, Option>>): Command {
  for (const [name, option] of Object.entries(flags)) {
    if (option.attributeName() !== name) throw new Error(`the option ${option.flags} is called ${name} in its table`);
    command.addOption(option);
  }
  return command;
}

/** The `configure` of a command: its options, what it does with them, and the text after the list of options. */
export function configured<Flags extends Readonly<Record<string, Option>>>(
  flags: Flags,
  run: (options: OptionValues<Flags>, io: Io) => void | Promise<void>,
  help?: string,
): (command: Command, io: Io) => void {
  return (command, io) => {
    addOptions(command, flags).action((options: OptionValues<Flags>) => run(options, io));
    if (help !== undefined) command.addHelpText('after', help);
  };
}

export function wholeNumber(least: number): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (!/^\d+$/.test(text) || !Number.isSafeInteger(value) || value < least)
      throw new InvalidArgumentError(`It must be an integer >= ${least}.`);
    return value;
  };
}

/** `1024,2048,4096` */
export function wholeNumbers(least: number): (text: string) => number[] {
  return (text) => text.split(',').map((part) => wholeNumber(least)(part.trim()));
}

/** `0,50,100` */
export function percentages(text: string): number[] {
  const values = wholeNumbers(0)(text);
  if (values.some((value) => value > 100)) throw new InvalidArgumentError('It must be at most 100 percent.');
  return values;
}

export function numberFrom(least: number): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (text.trim() === '' || !Number.isFinite(value) || value < least)
      throw new InvalidArgumentError(`It must be a number >= ${least}.`);
    return value;
  };
}

/** `shape` describes the JSON value, such as `{ok, rows: [{rule, level}]}`. */
export function jsonOption(shape?: string): Flag<boolean | undefined> {
  return flag('--json', shape ? `print JSON on stdout: ${shape}` : 'print JSON on stdout');
}

export function csvOption(): Flag<boolean | undefined> {
  return flag('--csv', 'print the rows as CSV on stdout').conflicts('json');
}

export function threadsOption(): Flag<number | undefined> {
  return parsed('--threads <n>', 'CPU threads (default: all cores)', wholeNumber(1));
}
