/** The environment chooses how this machine computes (NSA_FORCE_PARITY and the like), never which model it is. */

import { problemLine } from '../config/check.js';
import { environmentLayer, environmentWarnings, unreadVariables } from '../config/legacy/environment.js';
import { checkConfig } from '../config/parse.js';
import type { Config } from '../config/schema.js';
import type { Environment } from '../environment.js';
import { UsageError } from '../errors.js';

const SECTION = 'runtime.';

/** Keys of `runtime` that reading a prompt with a model depends on. */
export const PROMPT_KEYS: ReadonlySet<string> = new Set(
  ['selection_kernel', 'selection_v2_min_len', 'prefill_tile', 'reference_kernels', 'fused', 'fused_min_len'].map(
    (name) => SECTION + name,
  ),
);

/** The config with the keys of `runtime` that the environment sets. */
export function withEnvironment(config: Config, env: Environment): Config {
  const layer = environmentLayer(env);
  const runtime: Record<string, unknown> = { ...config.runtime };
  for (const [path, { value }] of layer) if (path.startsWith(SECTION)) runtime[path.slice(SECTION.length)] = value;
  const checked = checkConfig({ ...config, runtime });
  if ('config' in checked) return checked.config;
  throw new UsageError(checked.problems.map((one) => problemLine(one, layer.get(one.path)?.where)).join('\n'));
}

/** Lines about variables without effect on a command that runs a saved model. */
export function modelEnvironmentWarnings(env: Environment, command: string): string[] {
  return [...environmentWarnings(env), ...unreadVariables(env, command, (key) => !PROMPT_KEYS.has(key))];
}
