/** Reads the environment: NSA_* variables as a config layer, typed values for other commands, and notes about the rest. */
import { UsageError } from '../errors.js';
import { findKey } from './keys.js';
import { type Layer, LayerBuilder } from './layer.js';
import { show } from './parse.js';
import { hint } from './suggest.js';
import { type EnvironmentVariable, environmentVariables } from './variables.js';

/** What process.env is; handed in, so that a test or another process can hand in its own. */
export type Environment = Readonly<Record<string, string | undefined>>;

const byName: ReadonlyMap<string, EnvironmentVariable> = new Map(environmentVariables.map((row) => [row.name, row]));

const TRUE = new Set(['1', 'true', 'yes', 'on']);
const FALSE = new Set(['0', 'false', 'no', 'off']);
const INTEGER = /^[-+]?\d+$/;
const NUMBER = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i;

function refuse(variable: EnvironmentVariable, text: string, allowed: string): never {
  throw new UsageError(`${variable.name}: ${show(text)} is not allowed; ${allowed}`);
}

function readFlag(variable: EnvironmentVariable, text: string): boolean {
  const word = text.toLowerCase();
  if (TRUE.has(word)) return true;
  if (FALSE.has(word)) return false;
  return refuse(variable, text, '0 or 1');
}

function readNumber(variable: EnvironmentVariable, text: string, pattern: RegExp): number {
  if (pattern.test(text)) return Number(text);
  const article = variable.type === 'integer' ? 'an integer' : 'a number';
  return refuse(variable, text, (variable.key === null ? undefined : findKey(variable.key)?.allowed) ?? article);
}

/** The typed value; undefined when the variable says nothing (unset, empty, or a `disable` of 0). */
function readTyped(variable: EnvironmentVariable, env: Environment): boolean | number | string | undefined {
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
      return readNumber(variable, text, INTEGER);
    case 'number':
      return readNumber(variable, text, NUMBER);
    case 'text':
      return text;
    case 'none':
      return undefined;
  }
}

/** The typed value of a variable of the table, for the command that reads it; undefined when unset or empty. */
export function readVariable(env: Environment, name: string): boolean | number | string | undefined {
  const variable = byName.get(name);
  // Not a user's mistake: a command asks for a variable that nobody documented.
  if (variable === undefined) throw new Error(`${name} is not in the table of variables`);
  return readTyped(variable, env);
}

/** What the environment sets in the config. */
export function environmentLayer(env: Environment): Layer {
  const layer = new LayerBuilder();
  for (const variable of environmentVariables) {
    const value = variable.key === null ? undefined : readTyped(variable, env);
    if (value !== undefined) layer.set(variable.key!, value, `env ${variable.name}`);
  }
  return layer.build();
}

/** One line for every NSA_* variable that is set and does nothing: misspelt, unknown, or without meaning here. */
export function environmentWarnings(env: Environment): string[] {
  const known = [...byName.keys()].filter((name) => name.startsWith('NSA_'));
  return Object.keys(env)
    .filter((name) => name.startsWith('NSA_') && env[name] !== undefined && env[name] !== '')
    .sort()
    .flatMap((name) => {
      const variable = byName.get(name);
      if (variable === undefined) return [`${name}: unknown variable, ignored${hint(name, known)}`];
      return variable.type === 'none' ? [`${name}: no effect; ${variable.meaning}`] : [];
    });
}

export interface Ranks {
  rank: number;
  worldSize: number;
  localRank: number;
  masterAddress: string;
  masterPort: number;
  timeoutMinutes: number;
}

/** This process among the ranks of a run; a single process when the environment says nothing. */
export function readRanks(env: Environment): Ranks {
  const integer = (name: string, otherwise: number, least: number, most: number): number => {
    const value = (readVariable(env, name) as number | undefined) ?? otherwise;
    if (value < least || value > most) refuse(byName.get(name)!, String(value), `an integer from ${least} to ${most}`);
    return value;
  };
  const worldSize = integer('WORLD_SIZE', 1, 1, 1 << 16);
  const rank = integer('RANK', 0, 0, worldSize - 1);
  const timeoutMinutes = (readVariable(env, 'NSA_PG_TIMEOUT_MIN') as number | undefined) ?? 15;
  if (timeoutMinutes <= 0) refuse(byName.get('NSA_PG_TIMEOUT_MIN')!, String(timeoutMinutes), 'a number > 0');
  return {
    rank,
    worldSize,
    localRank: integer('LOCAL_RANK', rank, 0, worldSize - 1),
    masterAddress: (readVariable(env, 'MASTER_ADDR') as string | undefined) ?? '127.0.0.1',
    masterPort: integer('MASTER_PORT', 29500, 1, 65535),
    timeoutMinutes,
  };
}
