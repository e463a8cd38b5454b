/** Reads the environment: NSA_* variables as a config layer, typed values for other commands, and notes about the rest. */
import { findKey } from './keys.js';
import { type Layer, LayerBuilder } from './layer.js';
import { hint } from './suggest.js';
import { type Environment, readTyped, readVariable, refuse, variableOf } from './typed-variable.js';
import { environmentVariables } from './variables.js';

export { type Environment, readVariable } from './typed-variable.js';

/** What the environment sets in the config. */
export function environmentLayer(env: Environment): Layer {
  const layer = new LayerBuilder();
  for (const variable of environmentVariables) {
    const value = variable.key === null ? undefined : readTyped(variable, env, findKey(variable.key)?.allowed);
    if (value !== undefined) layer.set(variable.key!, value, `env ${variable.name}`);
  }
  return layer.build();
}

/** One line for every NSA_* variable that is set and does nothing: misspelt, unknown, or without meaning here. */
export function environmentWarnings(env: Environment): string[] {
  const known = environmentVariables.map(({ name }) => name).filter((name) => name.startsWith('NSA_'));
  return Object.keys(env)
    .filter((name) => name.startsWith('NSA_') && env[name] !== undefined && env[name] !== '')
    .sort()
    .flatMap((name) => {
      const variable = variableOf(name);
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
    if (value < least || value > most) refuse(variableOf(name)!, String(value), `an integer from ${least} to ${most}`);
    return value;
  };
  const worldSize = integer('WORLD_SIZE', 1, 1, 1 << 16);
  const rank = integer('RANK', 0, 0, worldSize - 1);
  const timeoutMinutes = (readVariable(env, 'NSA_PG_TIMEOUT_MIN') as number | undefined) ?? 15;
  if (timeoutMinutes <= 0) refuse(variableOf('NSA_PG_TIMEOUT_MIN')!, String(timeoutMinutes), 'a number > 0');
  return {
    rank,
    worldSize,
    localRank: integer('LOCAL_RANK', rank, 0, worldSize - 1),
    masterAddress: (readVariable(env, 'MASTER_ADDR') as string | undefined) ?? '127.0.0.1',
    masterPort: integer('MASTER_PORT', 29500, 1, 65535),
    timeoutMinutes,
  };
}
