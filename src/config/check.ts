/**
 * Checks a plain object against the schema of a config: one line per problem, `path: value is not allowed; allowed values`.
 * Looks at no file, so it runs in a browser too; parse.ts first translates earlier names and finds the source of a path.
 */

import { UsageError } from '../errors.js';
import type * as z from '../zod.js';
import { configSections, findKey, keysOf } from './keys.js';
import { oldValues } from './legacy/keys.js';
import { itemProblem } from './mixture.js';
import type { ConfigProblem } from './rules.js';
import { type Config, configSchema } from './schema.js';
import { hint } from './suggest.js';

/** Formats a value for a message: shortened, with its type recognizable. */
export function show(value: unknown): string {
  if (value === undefined) return 'nothing';
  // JSON.stringify would turn NaN and Infinity into null.
  const finite = (_: string, item: unknown) =>
    typeof item === 'number' && !Number.isFinite(item) ? String(item) : item;
  const text = typeof value === 'number' ? String(value) : (JSON.stringify(value, finite) ?? String(value));
  return text.length > 60 ? `${text.slice(0, 57)}…` : text;
}

/** The problem of a name that is not in the schema. */
export function unknownKeyProblem(path: string): ConfigProblem {
  const dot = path.indexOf('.');
  const section = dot < 0 ? path : path.slice(0, dot);
  if (dot < 0 || !configSections.includes(section)) {
    const allowed = `one of ${configSections.join(', ')}`;
    const keys = dot < 0 ? configSections.filter((name) => keysOf(name).includes(path)) : [];
    const near =
      keys.length > 0
        ? ` (did you mean ${keys.map((name) => `${name}.${path}`).join(' or ')}?)`
        : hint(section, configSections);
    return { path, message: `unknown section; ${allowed}${near}` };
  }
  const names = keysOf(section);
  const near = hint(path.slice(dot + 1), names);
  return { path, message: `unknown key${near || `; ${section} has ${names.join(', ')}`}` };
}

/** The problem of a value that its key does not allow. */
function valueProblem(path: string, value: unknown): ConfigProblem {
  const key = findKey(path);
  if (key === undefined) return unknownKeyProblem(path);
  const earlier = oldValues.filter((old) => old.key === path).map(({ name }) => name);
  const near = typeof value === 'string' && key.kind === 'choice' ? hint(value, [...key.choices, ...earlier]) : '';
  return { path, message: `${show(value)} is not allowed; ${key.allowed}${near}` };
}

/** The problem of a section that is not a mapping. */
export function sectionProblem(section: string, value: unknown): ConfigProblem {
  return {
    path: section,
    message: `${show(value)} is not allowed; keys such as ${keysOf(section).slice(0, 3).join(', ')}`,
  };
}

function valueAt(input: unknown, path: readonly PropertyKey[]): unknown {
  let value = input;
  for (const name of path) value = (value as Record<PropertyKey, unknown> | undefined)?.[name];
  return value;
}

function issueProblems(issue: z.core.$ZodIssue, input: unknown): ConfigProblem[] {
  // Deeper issues (an item of train.betas) are reported for the key.
  const parts = issue.path.slice(0, 2);
  const path = parts.join('.');
  if (path === 'data.sources' && issue.path.length > 2) {
    const unknown = issue.code === 'unrecognized_keys' ? issue.keys : [];
    return [itemProblem(valueAt(input, parts), issue.path.slice(2), unknown)];
  }
  if (issue.code === 'custom') return [{ path, message: issue.message }];
  if (issue.code === 'unrecognized_keys' && parts.length < 2) {
    return issue.keys.map((name) => unknownKeyProblem(path === '' ? name : `${path}.${name}`));
  }
  const value = valueAt(input, parts);
  if (parts.length === 0)
    return [{ path, message: `${show(value)} is not a config; sections ${configSections.join(', ')}` }];
  return [parts.length === 1 ? sectionProblem(path, value) : valueProblem(path, value)];
}

/** The config, or all its problems; a key with several wrong items is reported once. Nothing is looked up on the disk. */
export function checkAsGiven(input: unknown): { config: Config } | { problems: ConfigProblem[] } {
  const result = configSchema.safeParse(input);
  if (result.success) return { config: result.data };
  const problems = new Map<string, ConfigProblem>();
  for (const problem of result.error.issues.flatMap((issue) => issueProblems(issue, input))) {
    problems.set(`${problem.path}: ${problem.message}`, problem);
  }
  return { problems: [...problems.values()] };
}

export function problemLine(problem: ConfigProblem, where?: string): string {
  const place = where === undefined ? '' : ` [${where}]`;
  return `${problem.path === '' ? 'config' : problem.path}: ${problem.message}${place}`;
}

/** The config of an object whose keys have their present names and that names its data source. */
export function parseAsGiven(input: unknown): Config {
  return configOf(checkAsGiven(input));
}

/** The config of a check; its problems are thrown. */
export function configOf(checked: ReturnType<typeof checkAsGiven>): Config {
  if ('config' in checked) return checked.config;
  throw new UsageError(checked.problems.map((problem) => problemLine(problem)).join('\n'));
}
