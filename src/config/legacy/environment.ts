/** The environment as a config layer, and warnings about NSA_* variables without effect. */
import type { Environment } from '../../environment.js';
import { findKey } from '../keys.js';
import { type Layer, LayerBuilder } from '../layer.js';
import { hint } from '../suggest.js';
import { presentKey } from './keys.js';
import { readTyped, readVariable, refuse, variableOf } from './typed-variable.js';
import { environmentVariables } from './variables.js';

export { readVariable } from './typed-variable.js';

/** The config keys that environment variables set. */
export function environmentLayer(env: Environment): Layer {
  const layer = new LayerBuilder();
  for (const variable of environmentVariables) {
    const value =
      variable.key === null ? undefined : readTyped(variable, env, findKey(presentKey(variable.key))?.allowed);
    if (value !== undefined) layer.set(variable.key!, value, `env ${variable.name}`);
  }
  return layer.build();
}

/** One line for every NSA_* variable that is set and has no effect: misspelled, unknown or retired. */
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

/** The keys that a training does not read: it reads no prompts, except for samples of its text. */
export const TRAINING_IGNORES = (key: string): boolean => key === 'runtime.prefill_tile';

/** One line with the variables that are set and whose keys a command does not read; empty if there are none. */
export function unreadVariables(env: Environment, command: string, ignores: (key: string) => boolean): string[] {
  const names = environmentVariables
    .filter(({ key, name }) => key !== null && env[name]?.trim() && ignores(presentKey(key)))
    .map(({ name }) => name);
  return names.length === 0 ? [] : [`no effect on ${command}: ${names.join(', ')}`];
}

const DEFAULT_TIMEOUT_MINUTES = 15;

/** Minutes that a rank waits for the others: NSA_PG_TIMEOUT_MIN, may be fractional. */
export function readTimeoutMinutes(env: Environment): number {
  const minutes = (readVariable(env, 'NSA_PG_TIMEOUT_MIN') as number | undefined) ?? DEFAULT_TIMEOUT_MINUTES;
  if (minutes <= 0) refuse(variableOf('NSA_PG_TIMEOUT_MIN')!, String(minutes), 'a number > 0');
  return minutes;
}
