/** Options that several commands share, and parsers that reject bad values with one line. */
import { InvalidArgumentError, Option } from 'commander';

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

/** `shape` describes the JSON value, such as `{ok, rows: [{rule, level}]}`. */
export function jsonOption(shape?: string): Option {
  return new Option('--json', shape ? `print JSON on stdout: ${shape}` : 'print JSON on stdout');
}

export function threadsOption(): Option {
  return new Option('--threads <n>', 'CPU threads (default: all cores)').argParser(wholeNumber(1));
}
