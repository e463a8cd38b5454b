/** Options that several commands share, and parsers that refuse bad values in one line. */
import { InvalidArgumentError, Option } from 'commander';

export function wholeNumber(least: number): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (!/^\d+$/.test(text) || !Number.isSafeInteger(value) || value < least)
      throw new InvalidArgumentError(`It must be a whole number from ${least}.`);
    return value;
  };
}

/** `1024,2048,4096` */
export function wholeNumbers(least: number): (text: string) => number[] {
  return (text) => text.split(',').map((part) => wholeNumber(least)(part.trim()));
}

export function jsonOption(): Option {
  return new Option('--json', 'print one JSON value on stdout, everything else on stderr');
}

export function threadsOption(): Option {
  return new Option('--threads <n>', 'CPU threads (default: all cores)').argParser(wholeNumber(1));
}
