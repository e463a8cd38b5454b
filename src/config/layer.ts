/** A layer: the keys that one source (flags, environment, a file, a profile) sets, with their origin. */
import { UsageError } from '../errors.js';
import { problemLine, sectionProblem, unknownKeyProblem } from './check.js';
import { configSections, findKey } from './keys.js';
import { presentKey, retiredKey, withPresentNames } from './legacy/keys.js';
import type { ConfigProblem } from './rules.js';

export interface Setting {
  value: unknown;
  /** Shown in the printed config: `flag --steps`, `env NSA_LR`, `configs/x.yaml`, `profile h200`, `default`. */
  origin: string;
  /** Shown in errors: the origin, with line and column if known. */
  where: string;
  /** The earlier name that was written, of the key or of its value. */
  written?: string;
}

export type Layer = ReadonlyMap<string, Setting>;

/** Collects settings; reports all unknown names in one error, so that a user can fix a file in one go. */
export class LayerBuilder {
  private readonly settings = new Map<string, Setting>();
  private readonly lines: string[] = [];

  /** A later setting of a key replaces an earlier one, as on a command line. */
  set(path: string, value: unknown, origin: string, where: string = origin): void {
    if (findKey(presentKey(path)) === undefined) {
      this.fail({ path, message: retiredKey(path) ?? unknownKeyProblem(path).message }, where);
      return;
    }
    this.settings.delete(path); // so that the map is in the order of the last settings
    this.settings.set(path, { value, origin, where });
  }

  fail(problem: ConfigProblem, where: string): void {
    this.lines.push(problemLine(problem, where));
  }

  /** The settings under their present names. In a file (`isFile`) two names of a key must not contradict each other. */
  build(isFile = false): Layer {
    const settings = withPresentNames(this.settings, (path, earlier) => {
      const message = `contradicts ${earlier}, which sets the same key`;
      if (isFile) this.fail({ path, message }, this.settings.get(path)!.where);
    });
    if (this.lines.length > 0) throw new UsageError(this.lines.join('\n'));
    return settings;
  }
}

function isMapping(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** The layer of a parsed YAML tree. Checks names; values are checked later, with the whole config. */
export function layerOfTree(tree: unknown, origin: string, whereOf: (path: readonly string[]) => string): Layer {
  const layer = new LayerBuilder();
  // An empty file or a section without keys sets nothing.
  if (tree !== null && tree !== undefined && !isMapping(tree)) {
    layer.fail({ path: '', message: `not a mapping; sections ${configSections.join(', ')}` }, origin);
  }
  for (const [section, keys] of Object.entries(isMapping(tree) ? tree : {})) {
    if (!configSections.includes(section)) layer.fail(unknownKeyProblem(section), whereOf([section]));
    else if (isMapping(keys)) {
      for (const [name, value] of Object.entries(keys))
        layer.set(`${section}.${name}`, value, origin, whereOf([section, name]));
    } else if (keys !== null) layer.fail(sectionProblem(section, keys), whereOf([section]));
  }
  return layer.build(true);
}
