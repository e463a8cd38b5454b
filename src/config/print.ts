/** A config for display (`train --print-config`) and as YAML (a run's config.yaml). */
import { stringify } from 'yaml';
import { configKeys } from './keys.js';
import type { ResolvedConfig } from './load.js';
import type { Config } from './schema.js';

export interface ConfigRow {
  key: string;
  value: unknown;
  origin: string;
}

/** The value of a key such as `train.lr`. */
export function configValue(config: Config, path: string): unknown {
  const [section, name] = path.split('.');
  return (config as unknown as Record<string, Record<string, unknown>>)[section]?.[name];
}

/** Every key in schema order: the JSON of --print-config. */
export function configRows(resolved: ResolvedConfig): ConfigRow[] {
  return configKeys.map(({ path }) => ({
    key: path,
    value: configValue(resolved.config, path),
    origin: resolved.origins.get(path) ?? 'default',
  }));
}

/** YAML with every key, so that a run stays repeatable after a default changes. */
export function toYaml(config: Config): string {
  return stringify(config, { lineWidth: 0 });
}
