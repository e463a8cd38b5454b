/** Options of the commands that read run folders. */
import { type Command, InvalidArgumentError, Option } from 'commander';
import { THRESHOLD_ENTRIES, type ThresholdName, type Thresholds } from '../../watch/thresholds.js';
import { wholeNumber } from './options.js';

export function dirOption(): Option {
  return new Option('--dir <folder>', 'run folder (its train.out_dir)').makeOptionMandatory();
}

export function numberFrom(least: number): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (text.trim() === '' || !Number.isFinite(value) || value < least)
      throw new InvalidArgumentError(`It must be a number >= ${least}.`);
    return value;
  };
}

/** Adds a flag for every threshold of the health rules. */
export function addThresholdOptions(command: Command): Command {
  for (const [, { flag, unit, meaning, default: value, variable, integer }] of THRESHOLD_ENTRIES) {
    const option = new Option(`--${flag} <${unit}>`, `${meaning} (default: ${value}, env ${variable})`);
    command.addOption(option.argParser(integer ? wholeNumber(0) : numberFrom(0)));
  }
  return command;
}

/** The thresholds that were given as flags. */
export function givenThresholds(options: Readonly<Record<string, unknown>>): Partial<Thresholds> {
  const camel = (flag: string) => flag.replace(/-(\w)/g, (_, letter: string) => letter.toUpperCase());
  const given: Partial<Record<ThresholdName, number>> = {};
  for (const [name, { flag }] of THRESHOLD_ENTRIES) {
    const value = options[camel(flag)];
    if (typeof value === 'number') given[name] = value;
  }
  return given;
}
