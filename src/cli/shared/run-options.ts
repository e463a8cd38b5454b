/** Options of the commands that read run folders. */
import { variableOf } from '../../config/legacy/typed-variable.js';
import { THRESHOLD_ENTRIES, type ThresholdName, type Thresholds } from '../../watch/thresholds.js';
import { type Flag, numberFrom, parsed, required, wholeNumber } from './options.js';

export function dirOption(): Flag<string> {
  return required('--dir <folder>', 'run folder (its train.out_dir)');
}

const camel = (flag: string) => flag.replace(/-(\w)/g, (_, letter: string) => letter.toUpperCase());

/** A flag for every threshold of the health rules; `givenThresholds` reads their values. */
export function thresholdOptions(): Readonly<Record<never, Flag<number>>> {
  return Object.fromEntries(
    THRESHOLD_ENTRIES.map(([, { flag, unit, default: value, variable }]) => {
      const { meaning, type } = variableOf(variable)!;
      const text = `${meaning} (default: ${value}, env ${variable})`;
      const parse = type === 'integer' ? wholeNumber(0) : numberFrom(0);
      return [camel(flag), parsed(`--${flag} <${unit}>`, text, parse)];
    }),
  );
}

/** The thresholds that were given as flags. */
export function givenThresholds(options: object): Partial<Thresholds> {
  const values = new Map<string, unknown>(Object.entries(options));
  const given: Partial<Record<ThresholdName, number>> = {};
  for (const [name, { flag }] of THRESHOLD_ENTRIES) {
    const value = values.get(camel(flag));
    if (typeof value === 'number') given[name] = value;
  }
  return given;
}
