/** The environment chooses how this machine computes (NSA_FORCE_PARITY and the like), never which model it is. */
import { environmentLayer } from '../config/legacy/environment.js';
import { parseConfig } from '../config/parse.js';
import type { Config } from '../config/schema.js';
import type { Environment } from '../environment.js';

const SECTION = 'runtime.';

/** The config with the keys of `runtime` that the environment sets. */
export function withEnvironment(config: Config, env: Environment): Config {
  const runtime: Record<string, unknown> = { ...config.runtime };
  for (const [path, { value }] of environmentLayer(env))
    if (path.startsWith(SECTION)) runtime[path.slice(SECTION.length)] = value;
  return parseConfig({ ...config, runtime });
}
