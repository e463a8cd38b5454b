/** Config files: found by shipped name or path, parsed as YAML with the position of every key. */
import { existsSync, readFileSync, statSync } from 'node:fs';
import { basename, isAbsolute, join } from 'node:path';
import { LineCounter, parseDocument } from 'yaml';
import { UsageError } from '../errors.js';
import { type Layer, layerOfTree } from './layer.js';
import { findOldConfig } from './legacy/configs.js';
import { packageRoot, type Shelf, shippedConfigs } from './shipped.js';
import { hint } from './suggest.js';
import { yamlRefusal } from './yaml-shape.js';

/** Larger files are not configs. */
const MAX_BYTES = 1 << 20;

export interface ConfigFile {
  path: string;
  /** Name in messages and in the printed config. */
  label: string;
  /** Where it was named by an earlier name: that name, and what that config sets besides. */
  earlier?: { readonly name: string; readonly sets: Readonly<Record<string, unknown>> };
}

/**
 * Finds a config by shipped name or by path. `configs/x.yaml` falls back to the shipped file, so that commands of the
 * runbooks work in any folder.
 */
export function findConfig(name: string, shelf: Shelf = 'configs', root: string = packageRoot): ConfigFile {
  const names = shippedConfigs(shelf, root);
  if (names.includes(name)) return { path: join(root, shelf, `${name}.yaml`), label: `${shelf}/${name}.yaml` };
  if (existsSync(name)) return { path: name, label: name };
  const relative = name.replace(/^\.\//, '');
  if (!isAbsolute(name) && relative.startsWith('configs/') && existsSync(join(root, relative))) {
    return { path: join(root, relative), label: relative };
  }
  const old = shelf === 'configs' ? findOldConfig(name) : undefined;
  if (old !== undefined && names.includes(old.config)) return { ...findConfig(old.config, shelf, root), earlier: old };
  const typed = basename(basename(name, '.yaml'), '.yml');
  const kind = shelf === 'configs' ? 'config' : 'profile';
  const shipped = hint(typed, names) || `; shipped: ${names.join(', ')}`;
  throw new UsageError(`${name}: no such file and no shipped ${kind}${shipped}`);
}

function readText(file: ConfigFile): string {
  try {
    const stat = statSync(file.path);
    if (stat.isDirectory()) throw new UsageError(`${file.label}: is a folder; give a YAML file`);
    if (stat.size > MAX_BYTES) throw new UsageError(`${file.label}: ${stat.size} bytes is too large for a config`);
    return readFileSync(file.path, 'utf8');
  } catch (error) {
    if (error instanceof UsageError) throw error;
    const reason = (error as NodeJS.ErrnoException).code ?? String(error);
    throw new UsageError(`${file.label}: cannot be read (${reason})`, { cause: error });
  }
}

/** A line about a config that was named by an earlier name. */
export function earlierNameLine({ label, earlier }: ConfigFile): string[] {
  if (earlier === undefined) return [];
  const sets = Object.entries(earlier.sets).map(([key, value]) => `${key}=${value}`);
  const besides = sets.length > 0 ? ` with ${sets.join(' ')}` : '';
  return [`${earlier.name} is now ${label}${besides} (docs/reference/legacy-names.md)`];
}

/** The layer of a YAML file; `origin` is shown for its keys in the printed config. */
export function readLayer(file: ConfigFile, origin: string = file.label): Layer {
  const lines = new LineCounter();
  const text = readText(file);
  const refusal = yamlRefusal(text);
  if (refusal !== null) throw new UsageError(`${file.label}: ${refusal}`);
  const document = parseDocument(text, { lineCounter: lines, prettyErrors: false });
  const place = (offset: number) => {
    const { line, col } = lines.linePos(offset);
    return `${file.label}:${line}:${col}`;
  };
  if (document.errors.length > 0) {
    const found = document.errors.map((error) => `${place(error.pos[0])}: ${error.message.replace(/\s+/g, ' ')}`);
    throw new UsageError(found.join('\n'));
  }
  const layer = layerOfTree(treeOf(document, file), origin, (path) => {
    const node = document.getIn(path, true) as { range?: readonly number[] } | undefined;
    return node?.range === undefined ? file.label : place(node.range[0]);
  });
  const { name, sets = {} } = file.earlier ?? {};
  const besides = Object.entries(sets).map(([key, value]) => [key, { value, origin: name!, where: name! }] as const);
  return new Map([...layer, ...besides]);
}

function treeOf(document: ReturnType<typeof parseDocument>, file: ConfigFile): unknown {
  try {
    return document.toJS();
  } catch (error) {
    // YAML aliases that are undefined or expand without limit ("billion laughs").
    throw new UsageError(`${file.label}: ${(error as Error).message}`, { cause: error });
  }
}
