/** A config to look at (`train --print-config`) and to keep (a run's config.yaml). */
import { stringify } from 'yaml';
import { configKeys } from './keys.js';
import type { ResolvedConfig } from './load.js';
import type { Config } from './schema.js';

export interface ConfigRow {
  key: string;
  value: unknown;
  origin: string;
}

/** The value of a key by its path. */
export function configValue(config: Config, path: string): unknown {
  const [section, name] = path.split('.');
  return (config as Record<string, Record<string, unknown>>)[section]?.[name];
}

/** Every key in the order of the schema; also the JSON form of --print-config. */
export function configRows(resolved: ResolvedConfig): ConfigRow[] {
  return configKeys.map(({ path }) => ({
    key: path,
    value: configValue(resolved.config, path),
    origin: resolved.origins.get(path) ?? 'default',
  }));
}

/** Aligned text: key, value, origin. */
export function configTable(resolved: ResolvedConfig): string {
  const rows = configRows(resolved).map((row) => {
    const value = typeof row.value === 'string' ? row.value : JSON.stringify(row.value);
    return [row.key, value, row.origin];
  });
  const cells = [['key', 'value', 'origin'], ...rows];
  const width = (column: number) => Math.max(...cells.map((row) => row[column].length));
  const [keyWidth, valueWidth] = [width(0), width(1)];
  return cells
    .map(([key, value, origin]) => `${key.padEnd(keyWidth)}  ${value.padEnd(valueWidth)}  ${origin}`)
    .join('\n');
}

/** YAML that loads to the same config, every key written out: a run is repeatable even after a default changes. */
export function toYaml(config: Config): string {
  return stringify(config, { lineWidth: 0 });
}
