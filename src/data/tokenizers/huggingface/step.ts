/** The common part of the components of a tokenizer.json: their description in the file, and patterns. */

import { UsageError } from '../../../errors.js';
import * as z from '../../../zod.js';
import { SplitPreTokenizer } from './library.js';

/** A normalizer, pre-tokenizer, post-processor or decoder as the file describes it. */
export interface Step {
  readonly type: string;
  readonly [key: string]: unknown;
}
export const Step: z.ZodType<Step> = z.looseObject({ type: z.string() });

const MAX_STEPS = 100;

/** The steps of a `Sequence`. */
export function stepsOf(step: Step, key: string): readonly Step[] {
  const steps = z.array(Step).parse(step[key] ?? []);
  if (steps.length > MAX_STEPS) throw new Error(`a Sequence has ${steps.length} steps, more than ${MAX_STEPS}`);
  return steps;
}

/** A string field of a step. */
export function textOf(step: Step, key: string, missing?: string): string {
  const value = step[key] ?? missing;
  if (typeof value === 'string') return value;
  throw new Error(`${step.type}: "${key}" is not a string`);
}

const Pattern = z.object({ String: z.string().optional(), Regex: z.string().optional() });

/** The pattern of a Split or Replace step, `{"String": …}` or `{"Regex": …}`, with the flags g and u. */
export function patternOf(step: Step): RegExp {
  const { String: literal, Regex: source } = Pattern.safeParse(step['pattern']).data ?? {};
  if (literal !== undefined) return new RegExp(escapePattern(literal), 'gu');
  if (source !== undefined) return compile(source);
  throw new Error(`${step.type}: "pattern" is neither {"String": …} nor {"Regex": …}`);
}

const LETTERS_AND_NUMBERS = ['\\p{N}', '\\p{N}{1,3}'];

/**
 * The word patterns of GPT-2 and of the models after it, which need time in proportion to the text whatever it is: every
 * attempt ends in a match of almost all that it looked at. Any other pattern is run under a limit of time.
 */
const LINEAR_PATTERNS: ReadonlySet<string> = new Set([
  "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
  "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
  ...LETTERS_AND_NUMBERS,
  '[0-9]',
  '[0-9][0-9][0-9]',
  '\\d',
  '[\\r\\n]',
  ' ',
  '[^\\r\\n\\p{L}\\p{N}]?\\p{L}+',
  ...LETTERS_AND_NUMBERS.map(
    (number) =>
      `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|${number}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+`,
  ),
  ...LETTERS_AND_NUMBERS.map(
    (number) =>
      "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|" +
      "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|" +
      `${number}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+`,
  ),
]);

/** The first pattern of these steps that is not known to be linear; undefined if there is none. */
export function doubtfulPattern(...steps: readonly (Step | null | undefined)[]): string | undefined {
  for (const value of steps.flatMap((step) => [...valuesIn(step)])) {
    const { Regex: source } = Pattern.safeParse(value).data ?? {};
    if (source !== undefined && !LINEAR_PATTERNS.has(source)) return source;
  }
  return undefined;
}

/** All objects in JSON data. */
function* valuesIn(value: unknown): Generator<object> {
  if (typeof value !== 'object' || value === null) return;
  if (!Array.isArray(value)) yield value;
  for (const inner of Object.values(value)) yield* valuesIn(inner);
}

/** More than a normalizer needs: the compatibility forms of some characters have 18. */
const GROWTH = 32;

/** Refuses a text that became far longer than it was. */
export function expectGrowth(length: number, { length: original }: string): void {
  if (length > GROWTH * (original + 64))
    throw new UsageError(`a step of the tokenizer makes a text ${GROWTH} times as long; use another tokenizer`);
}

/** Replaces all matches. */
export function replaced(text: string, pattern: RegExp, content: string): string {
  let length = text.length;
  return text.replace(pattern, () => {
    length += content.length;
    expectGrowth(length, text);
    return content;
  });
}

/**
 * Patterns in these files are Oniguruma's. JavaScript's differ: \s and \w have other members, and Node 20 has no (?i:…).
 * The library's translation handles that; it is reachable only through its Split step.
 */
export function compile(source: string): RegExp {
  const { pattern } = new SplitPreTokenizer({
    type: 'Split',
    pattern: { Regex: source },
    behavior: 'Isolated',
    invert: false,
  });
  if (pattern === null) throw new Error(`cannot translate the pattern ${source}`);
  return pattern;
}

export function escapePattern(text: string): string {
  return text.replace(/[\\^$.*+?()[\]{}|/-]/g, (char) => (char === '-' ? '\\x2d' : `\\${char}`));
}
