/** Typed values of environment variables. Does not import the schema, so that commands without a config start fast. */
import type { Environment } from '../../environment.js';
import { UsageError } from '../../errors.js';
import { type EnvironmentVariable, environmentVariables } from './variables.js';

const byName: ReadonlyMap<string, EnvironmentVariable> = new Map(environmentVariables.map((row) => [row.name, row]));

export function variableOf(name: string): EnvironmentVariable | undefined {
  return byName.get(name);
}

const TRUE = new Set(['1', 'true', 'yes', 'on']);
const FALSE = new Set(['0', 'false', 'no', 'off']);
const INTEGER = /^[-+]?\d+$/;
const NUMBER = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i;

export function refuse(variable: EnvironmentVariable, text: string, allowed: string): never {
  throw new UsageError(`${variable.name}: ${JSON.stringify(text)} is not allowed; ${allowed}`);
}

function readFlag(variable: EnvironmentVariable, text: string): boolean {
  const word = text.toLowerCase();
  if (TRUE.has(word)) return true;
  if (FALSE.has(word)) return false;
  return refuse(variable, text, '0 or 1');
}

function readNumber(variable: EnvironmentVariable, text: string, pattern: RegExp, allowed?: string): number {
  if (pattern.test(text)) return Number(text);
  return refuse(variable, text, allowed ?? (variable.type === 'integer' ? 'an integer' : 'a number'));
}

/** The typed value; undefined if the variable is unset, empty, or a `disable` of 0. `allowed` is for the error message. */
export function readTyped(
  variable: EnvironmentVariable,
  env: Environment,
  allowed?: string,
): boolean | number | string | undefined {
  const text = env[variable.name]?.trim();
  if (text === undefined || text === '') return undefined;
  switch (variable.type) {
    case 'flag':
      return readFlag(variable, text);
    case 'disable':
      return readFlag(variable, text) ? false : undefined;
    case 'ranges':
      return readFlag(variable, text) ? 'v2' : 'v1';
    case 'integer':
      return readNumber(variable, text, INTEGER, allowed);
    case 'number':
      return readNumber(variable, text, NUMBER, allowed);
    case 'text':
      return text;
    case 'none':
      return undefined;
  }
}

/** The typed value of a variable that a command reads directly; undefined if unset or empty. */
export function readVariable(env: Environment, name: string): boolean | number | string | undefined {
  const variable = byName.get(name);
  // A programming error: every variable that is read must be in the table.
  if (variable === undefined) throw new Error(`${name} is not in the table of variables`);
  return readTyped(variable, env);
}
