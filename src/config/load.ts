/** Resolves a config: flag > environment > file > profile > default, with the origin of every value. */
import { join } from 'node:path';
import type { Environment } from '../environment.js';
import { UsageError } from '../errors.js';
import { problemLine, show } from './check.js';
import { ignoredPath, readsPath } from './data-sources.js';
import { type ConfigFile, earlierNameLine, findConfig, readLayer } from './files.js';
import { canRead, completeMixture, guessSource } from './implied-source.js';
import { configKeys, findKey } from './keys.js';
import { type Layer, layerOfTree, type Setting } from './layer.js';
import { environmentLayer, environmentWarnings } from './legacy/environment.js';
import { checkConfig } from './parse.js';
import type { Config, ConfigInput } from './schema.js';
import { packageRoot } from './shipped.js';

export interface LoadOptions {
  env: Environment;
  /** Keys set by flags: `parseTrainFlags(argv).layer`. */
  flags?: Layer;
  /** The value of --config; defaults to env CONFIG. */
  config?: string | null;
  /** The config if neither is given, such as `pickConfigByGpuMemory(…)`. */
  otherwise?: string | null;
  /** The keys that the model of `train.init_from` sets, given its path and `train.out_dir`. Default: none are read from it. */
  modelLayer?: (path: string, outDir: string) => Layer;
  /** Folder that contains configs/; a parameter for tests. */
  root?: string;
}

export interface ResolvedConfig {
  config: Config;
  /** Origin of every key: `flag --steps`, `env NSA_LR`, `configs/x.yaml`, `profile h200` or `default`. */
  origins: ReadonlyMap<string, string>;
  /** Label of the config file; null without one. */
  file: string | null;
  /** Warnings about variables without effect. */
  warnings: string[];
  /** A line for every source that was guessed from what lies at its path. */
  guesses: string[];
}

const EMPTY: Layer = new Map();

/** Prefix of a data.path inside the installed package. */
const PACKAGE_PREFIX = 'package:';

function fileLayer(options: LoadOptions, root: string): { layer: Layer; file: ConfigFile | null } {
  const fromEnvironment = options.env['CONFIG']?.trim() || null;
  const name = options.config ?? fromEnvironment ?? options.otherwise ?? null;
  if (name === null) return { layer: EMPTY, file: null };
  const file = findConfig(name, 'configs', root);
  return { layer: readLayer(file), file };
}

/** The layer of the profile that the highest layer names. */
function profileLayer(layers: readonly Layer[], root: string): Layer {
  const named = layers.map((layer) => layer.get('runtime.profile')).find((setting) => setting !== undefined);
  if (named === undefined || named.value === null) return EMPTY;
  // A wrong type is reported by the schema.
  if (typeof named.value !== 'string' || named.value === '') return EMPTY;
  const layer = readLayer(findProfile(named.value, named.where, root), `profile ${named.value}`);
  if (layer.has('runtime.profile')) {
    throw new UsageError(`runtime.profile: a profile cannot name a profile [${layer.get('runtime.profile')!.where}]`);
  }
  return layer;
}

function findProfile(name: string, where: string, root: string) {
  try {
    return findConfig(name, 'configs/profiles', root);
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    throw new UsageError(`runtime.profile: ${error.message} [${where}]`, { cause: error });
  }
}

/** Merges the layers, the lowest first. */
function merge(lowestFirst: readonly Layer[], root: string): Map<string, Setting> {
  const merged = new Map<string, Setting>();
  for (const layer of lowestFirst) {
    dropContradicted(merged, layer, root);
    for (const [path, setting] of layer) merged.set(path, setting);
  }
  return merged;
}

/**
 * A path of a higher layer drops a lower source that cannot read it, and a source that reads no path drops a lower path:
 * `--config base --local-path DIR` trains on DIR, `--config quickstart --dataset synthetic` on no file.
 */
function dropContradicted(merged: Map<string, Setting>, layer: Layer, root: string): void {
  const [path, source] = [givenPath(layer, root), layer.get('data.source')];
  if (path !== null && source === undefined && !canRead(merged.get('data.source')?.value, path))
    merged.delete('data.source');
  if (source !== undefined && !readsPath(source.value))
    for (const key of ['data.path', 'data.val_path']) if (!layer.has(key)) merged.delete(key);
  // One source replaces a mixture of a lower layer, and the other way round.
  const isMixture = isGiven(layer.get('data.sources'));
  if (!isMixture && (path !== null || (source !== undefined && source.value !== 'mixture')))
    merged.delete('data.sources');
  if (isMixture)
    for (const key of ['data.source', 'data.path', 'data.val_path']) if (!layer.has(key)) merged.delete(key);
}

function isGiven(setting: Setting | undefined): boolean {
  return setting !== undefined && setting.value !== null;
}

/** Completes or refuses what the merged layers name: a path without a source implies one. */
function settleSource(settings: Map<string, Setting>, root: string): void {
  const mixture = settings.get('data.sources');
  if (isGiven(mixture) && !settings.has('data.source')) {
    const { origin, where } = mixture!;
    settings.set('data.source', { value: 'mixture', origin: `implied by ${origin}`, where });
    return;
  }
  const path = givenPath(settings, root);
  if (path === null) return;
  const { origin, where } = settings.get('data.path')!;
  const source = settings.get('data.source');
  if (source === undefined)
    settings.set('data.source', { value: guessSource(path).source, origin: `implied by ${origin}`, where });
  else if (!readsPath(source.value) && findKey('data.source')?.choices.includes(String(source.value)))
    throw new UsageError(ignoredPath(source.value, where));
}

/** `data.source: chat, as the lines of a.jsonl have messages`, for every path whose source is not given. */
function guessLines(settings: ReadonlyMap<string, Setting>, root: string): string[] {
  const line = (key: string, path: string) => {
    const { source, because } = guessSource(path);
    return `${key}: ${source}, as ${because}`;
  };
  const sources = settings.get('data.sources')?.value;
  if (Array.isArray(sources))
    return (sources as Readonly<Record<string, unknown>>[]).flatMap((one) =>
      typeof one?.['path'] === 'string' && one['source'] === undefined
        ? [line(`data.sources: ${one['name']}: source`, insidePackage(one['path'], root))]
        : [],
    );
  const path = givenPath(settings, root);
  return path === null || settings.has('data.source') ? [] : [line('data.source', path)];
}

/** Keys of a model that a config may change: no weight depends on them. */
const CHANGEABLE =
  /^model\.(rope_.*|norm_eps)$|^nsa\.(n_sel|w|init_blocks|local_blocks|selection|score_pool|gate_temp|cmp_rope|gate|force_.*|stopgrad_gates)$|^data\.tokenizer$/;

/**
 * Adds what the model of `train.init_from` decides. Shipped configs give way to it, and other sources may change what no
 * weight depends on; anything else that differs is an error.
 */
function addModel(
  settings: Map<string, Setting>,
  { modelLayer }: LoadOptions,
  isShipped: (setting: Setting) => boolean,
): void {
  const from = settings.get('train.init_from')?.value;
  if (typeof from !== 'string' || from === '' || !modelLayer) return;
  const model = modelLayer(from, String(settings.get('train.out_dir')?.value ?? ''));
  const lines: string[] = [];
  // A dense model has no section nsa: one of a shipped config would only hide what the model is.
  for (const [key, setting] of settings) if (/^(model|nsa)\./.test(key) && isShipped(setting)) settings.delete(key);
  for (const [key, own] of model) {
    const given = settings.get(key);
    const isOpen = key === 'model.vocab_size' && given?.value === null; // that of the data
    if (given === undefined || isOpen || isShipped(given)) settings.set(key, own);
    else if (JSON.stringify(given.value) !== JSON.stringify(own.value) && !CHANGEABLE.test(key))
      lines.push(`${key}: ${show(given.value)}, but ${show(own.value)} in ${from}; leave it out [${given.where}]`);
  }
  if (lines.length > 0) throw new UsageError(lines.join('\n'));
}

function givenPath(settings: ReadonlyMap<string, Setting>, root: string): string | null {
  const value = settings.get('data.path')?.value;
  return typeof value === 'string' && value !== '' ? insidePackage(value, root) : null;
}

function insidePackage(path: string, root: string): string {
  return path.startsWith(PACKAGE_PREFIX) ? join(root, path.slice(PACKAGE_PREFIX.length)) : path;
}

/** The settings by section and name, as the schema takes them. */
function sectionsOf(settings: ReadonlyMap<string, Setting>, root: string): Record<string, Record<string, unknown>> {
  const tree: Record<string, Record<string, unknown>> = {};
  for (const [path, { value }] of settings) {
    const [section, name] = path.split('.');
    tree[section] ??= {};
    const place = (given: string) => insidePackage(given, root);
    if (path === 'data.sources') tree[section][name] = completeMixture(value, place);
    else tree[section][name] = path === 'data.path' && typeof value === 'string' ? place(value) : value;
  }
  return tree;
}

/** The config of some settings. A problem is reported with the place of its key. */
function check(settings: ReadonlyMap<string, Setting>, root: string): Config {
  const checked = checkConfig(sectionsOf(settings, root));
  if ('config' in checked) return checked.config;
  const lines = checked.problems.map((problem) => problemLine(problem, settings.get(problem.path)?.where));
  throw new UsageError(lines.join('\n'));
}

/** The config of a command. Throws a UsageError that lists every problem with the file, flag or variable it came from. */
export function loadConfig(options: LoadOptions): ResolvedConfig {
  const root = options.root ?? packageRoot;
  const flags = options.flags ?? EMPTY;
  const environment = environmentLayer(options.env);
  const { layer, file } = fileLayer(options, root);
  const profile = profileLayer([flags, environment, layer], root);
  const settings = merge([profile, layer, environment, flags], root);
  const guesses = guessLines(settings, root);
  addModel(settings, options, ({ origin }) => file !== null && origin === file.label && isShippedFile(file, root));
  settleSource(settings, root);
  const config = check(settings, root);
  const origins = new Map(configKeys.map((key) => [key.path, settings.get(key.path)?.origin ?? 'default']));
  const warnings = [
    ...environmentWarnings(options.env),
    ...(file === null ? [] : earlierNameLine(file)),
    ...[layer, profile, flags].flatMap(oldNameLines),
  ];
  return { config, origins, file: file?.label ?? null, warnings, guesses };
}

function isShippedFile({ path }: ConfigFile, root: string): boolean {
  return path.startsWith(join(root, 'configs'));
}

const NAMED_KEYS = 3;

/**
 * One line for each file or flag with earlier names. A config.yaml that an earlier version wrote has a dozen of them, so only
 * the first are named. Not for the environment, whose variables have no other name, nor for --dataset.
 */
function oldNameLines(layer: Layer): string[] {
  const byOrigin = new Map<string, string[]>();
  for (const [key, { value, origin, written }] of layer) {
    if (written === undefined || origin === 'flag --dataset') continue;
    const now = written.includes('.') ? key : `${key} ${value}`;
    byOrigin.set(origin, [...(byOrigin.get(origin) ?? []), `${written} is now ${now}`]);
  }
  return [...byOrigin].map(([origin, names]) => {
    const more = names.length > NAMED_KEYS ? `, and ${names.length - NAMED_KEYS} more` : '';
    return `${origin}: ${names.slice(0, NAMED_KEYS).join(', ')}${more} (docs/reference/legacy-names.md)`;
  });
}

/**
 * Reads a shipped config by name or a YAML file and applies `overrides`. Ignores the command line and the environment.
 */
export function readConfig(nameOrFile: string, overrides: ConfigInput = {}): Config {
  const flags = layerOfTree(overrides, 'overrides', () => 'overrides');
  return loadConfig({ env: {}, config: nameOrFile, flags }).config;
}

/** Reads the config.yaml of a run, without environment and profile, which may have changed since. */
export function readSavedConfig(path: string): Config {
  return check(readLayer({ path, label: path }), packageRoot);
}

/** Drivers report a little less than the nominal size of a card, so the limits lie well between the sizes. */
const GPU_CONFIGS: readonly (readonly [atLeastGib: number, config: string])[] = [
  [70, '125m_80g'],
  [35, '125m_40g'],
  [0, '125m_24g'],
];

/** The config for a GPU with `gib` GiB of memory; null (no GPU) gives the quickstart, the only one that suits a CPU. */
export function pickConfigByGpuMemory(gib: number | null): string {
  if (gib === null) return 'quickstart';
  const found = GPU_CONFIGS.find(([atLeast]) => gib >= atLeast);
  if (found === undefined) throw new RangeError(`GPU memory of ${gib} GiB`);
  return found[1];
}
