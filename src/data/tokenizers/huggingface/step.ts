/** What the components of a tokenizer.json share: their description in the file, and patterns. */
import { z } from 'zod';
import { SplitPreTokenizer } from './library.js';

/** A normalizer, pre-tokenizer, post-processor or decoder as the file describes it. */
export interface Step {
  readonly type: string;
  readonly [key: string]: unknown;
}
export const Step: z.ZodType<Step> = z.looseObject({ type: z.string() });

/** The steps of a `Sequence`. */
export function stepsOf(step: Step, key: string): readonly Step[] {
  return z.array(Step).parse(step[key] ?? []);
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
