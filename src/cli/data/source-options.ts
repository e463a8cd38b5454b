/** Options that the commands of `trefoil data` share: the data, named as in a config. */

import { InvalidArgumentError } from 'commander';
import { DOCUMENT_SOURCES } from '../../config/data-sources.js';
import { FlagSettings } from '../../config/flags.js';
import { loadConfig } from '../../config/load.js';
import type { Config } from '../../config/schema.js';
import type { Io } from '../shared/io.js';
import { Flag, flag, jsonOption, type OptionValues, parsed, wholeNumber } from '../shared/options.js';

/** The flag of a command that takes these sources. */
export const datasetOption = (sources: readonly string[]) =>
  flag(
    '--dataset <source>',
    `data.source: one of ${sources.join(', ')} (default: that of the config or the path, else hub)`,
  );

export const SOURCE_OPTIONS = {
  config: flag('--config <name|file>', 'take the settings of a config'),
  dataset: datasetOption(DOCUMENT_SOURCES),
  localPath: flag('--local-path <path>', 'data.path: file, folder or pattern of a local source'),
  hubDataset: flag('--hub-dataset <name>', 'data.hub_dataset: owner/name of a dataset on the hub'),
  hubConfig: flag('--hub-config <name>', 'data.hub_config: its configuration, such as sample-10BT'),
  tokenizer: flag('--tokenizer <name>', 'data.tokenizer: byte, gpt2, stories or the path of a tokenizer.json'),
  workers: parsed('--workers <n>', 'data.workers: threads', wholeNumber(1)),
  set: new Flag<string[] | undefined>('--set <key=value>', 'set any config key; may be repeated').argParser(
    (text: string, before: string[] | undefined) => [...(before ?? []), text],
  ),
  json: jsonOption(),
};
export type SourceOptions = OptionValues<typeof SOURCE_OPTIONS>;

/** The config behind the flags: they win over the environment, and that over the file, as for `train`. */
export function sourceConfig(options: SourceOptions, io: Io, defaults: Readonly<Record<string, string>> = {}): Config {
  const flags = new FlagSettings();
  const pass = (flag: string, value: string | undefined) => value !== undefined && flags.add(flag, value);
  const set = (key: string, value: string | number | undefined) => value !== undefined && flags.set(`${key}=${value}`);
  const isNamed = options.config !== undefined || io.env['CONFIG'] !== undefined;
  // A path implies its source. Without a path and a config the source is FineWeb-Edu.
  const isOpen =
    options.localPath === undefined && !isNamed && !options.set?.some((text) => /^data\.(path|sources?)=/.test(text));
  const source = options.dataset ?? (isOpen ? 'hub' : undefined);
  pass('dataset', source);
  pass('local-path', options.localPath);
  for (const [key, value] of Object.entries(defaults)) set(key, value);
  set('data.hub_dataset', options.hubDataset);
  set('data.hub_config', options.hubConfig);
  set('data.tokenizer', options.tokenizer);
  set('data.workers', options.workers);
  flags.set(...(options.set ?? []));
  const { config, warnings, guesses } = loadConfig({
    env: io.env,
    flags: flags.layer,
    config: options.config ?? null,
  });
  for (const warning of warnings) io.warn(warning);
  for (const guess of guesses) io.err(guess);
  return config;
}

const UNITS: Readonly<Record<string, number>> = {
  '': 1,
  K: 1e3,
  KB: 1e3,
  M: 1e6,
  MB: 1e6,
  G: 1e9,
  GB: 1e9,
  T: 1e12,
  TB: 1e12,
  KIB: 2 ** 10,
  MIB: 2 ** 20,
  GIB: 2 ** 30,
  TIB: 2 ** 40,
};

/** `5GB`, `500MiB` or a plain number. */
export function byteCount(text: string): number {
  const match = /^(\d+(?:\.\d+)?)\s*([a-zA-Z]*)$/.exec(text.trim());
  const unit = match === null ? undefined : UNITS[match[2].toUpperCase()];
  const value = unit === undefined ? Number.NaN : Math.round(Number(match![1]) * unit);
  if (!Number.isSafeInteger(value) || value < 1)
    throw new InvalidArgumentError('It must be a number of bytes, such as 5GB, 500MB or 1000000.');
  return value;
}

/** With the unit that leaves one to three digits before the point: `950 B`, `1.2 kB`, `3.4 MB`. */
export function sizeText(bytes: number): string {
  if (bytes < 1000) return `${Math.round(bytes)} B`;
  const power = Math.min(3, Math.floor(Math.log10(bytes) / 3));
  return `${(bytes / 1000 ** power).toFixed(1)} ${['kB', 'MB', 'GB'][power - 1]}`;
}
