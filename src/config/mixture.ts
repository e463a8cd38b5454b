/** `data.sources`: several sources of training data, mixed by weight. Its schema, the rules between its items, its changes. */
import * as z from '../zod.js';
import { isOneOf, MIXED_SOURCES, PATH_SOURCES, readsPath } from './data-sources.js';
import type { ConfigProblem } from './rules.js';
import { hint } from './suggest.js';

/** Names are parts of file names, metrics and TensorBoard tags. */
const NAME = /^[A-Za-z][\w.-]{0,39}$/;
/** Three thirds, written with three digits, sum to 0.999. */
const SUM_TOLERANCE = 0.0011;

const item = z.strictObject({
  name: z.string().regex(NAME),
  source: z.enum(MIXED_SOURCES),
  path: z.string().trim().min(1).nullable().default(null),
  weight: z.number().positive(),
  epochs: z.int().min(1).max(Number.MAX_SAFE_INTEGER).default(1),
});

/** A source of a mixture, completed. */
export type MixedSource = z.output<typeof item>;
/** A source of a mixture, as it is written: `source` is implied by `path`, `epochs` is 1. */
export type MixedSourceInput = Omit<z.input<typeof item>, 'source'> & { source?: MixedSource['source'] | undefined };

export const mixtureSchema = z.array(item).min(1);

const FIELDS = Object.keys(item.shape);
export const MIXTURE_ALLOWED = `a list of sources, each {${FIELDS.join(', ')}}`;

const ALLOWED: Readonly<Record<string, string>> = {
  name: 'a name of up to 40 letters, digits, _, . and -, a letter first',
  source: `one of ${MIXED_SOURCES.join(', ')}`,
  path: 'a file, folder or glob',
  weight: 'a number > 0, its share of the tokens',
  epochs: 'an integer >= 1',
};

type Items = readonly Readonly<Record<string, unknown>>[];

/** The problem of a field of an item, as one line. `path`: the place of the problem inside the list. */
export function itemProblem(
  value: unknown,
  [index, field]: readonly PropertyKey[],
  unknownFields: readonly string[] = [],
): ConfigProblem {
  const one = (value as Items)[index as number] as Items[number] | undefined;
  const name = typeof one?.['name'] === 'string' ? one['name'] : `item ${Number(index) + 1}`;
  const at = (message: string) => ({ path: 'data.sources', message: `${name}: ${message}` });
  if (unknownFields.length > 0)
    return at(
      `unknown key ${unknownFields[0]}${hint(unknownFields[0], FIELDS) || `; a source has ${FIELDS.join(', ')}`}`,
    );
  if (field === undefined) return at(`not a source; give {${FIELDS.join(', ')}}`);
  const key = String(field);
  const given = one?.[key];
  if (given === undefined)
    return at(
      key === 'source' ? 'source is missing; give it, or a path that implies it' : `${key} is missing; ${ALLOWED[key]}`,
    );
  const staged = given === 'hub' ? '; stage the hub with trefoil data bootstrap or data prepare' : '';
  const near = key === 'source' && typeof given === 'string' ? hint(given, MIXED_SOURCES) : '';
  const shown = typeof given === 'number' ? String(given) : JSON.stringify(given);
  return at(`${key} ${shown} is not allowed; ${ALLOWED[key]}${near}${staged}`);
}

interface DataKeys {
  readonly source: string;
  readonly sources: readonly MixedSource[] | null;
  readonly path: string | null;
  readonly val_path: string | null;
  readonly synthetic_on_fail: boolean;
}

/** Rules between the items, and with the other keys of `data`. */
export function mixtureProblems({ source, sources, path, val_path, synthetic_on_fail }: DataKeys): ConfigProblem[] {
  const problems: ConfigProblem[] = [];
  const add = (key: string, message: string) => problems.push({ path: key, message });
  if (sources === null) {
    if (source === 'mixture') add('data.sources', 'missing; data.source mixture needs a list of sources');
    return problems;
  }
  if (source !== 'mixture') add('data.source', `${source} contradicts data.sources; leave one of the two out`);
  if (path !== null)
    add('data.path', 'not read beside data.sources, whose items have paths of their own; leave it out');
  if (val_path !== null) add('data.val_path', 'not read beside data.sources; data.val_fraction of each is set aside');
  if (synthetic_on_fail) add('data.synthetic_on_fail', 'true has no effect on data.sources; leave it out');
  const names = sources.map(({ name }) => name);
  for (const name of new Set(names.filter((one, i) => names.indexOf(one) !== i)))
    add('data.sources', `two sources are named ${name}; give each a name of its own`);
  const total = sources.reduce((sum, { weight }) => sum + weight, 0);
  if (sources.length > 0 && Math.abs(total - 1) > SUM_TOLERANCE) {
    const parts = sources.map(({ name, weight }) => `${name} ${weight}`).join(', ');
    add('data.sources', `the weights sum to ${Number(total.toPrecision(6))} (${parts}); make them sum to 1`);
  }
  for (const { name, source: kind, path: place } of sources) {
    if (readsPath(kind) && place === null) add('data.sources', `${name}: path is missing; source ${kind} reads one`);
    if (!readsPath(kind) && place !== null)
      add('data.sources', `${name}: source ${kind} reads no path; leave it out, or use one of ${pathSources()}`);
  }
  return problems;
}

const pathSources = () => MIXED_SOURCES.filter((name) => isOneOf(PATH_SOURCES, name)).join(', ');

export interface MixtureChange {
  readonly key: string;
  readonly before: unknown;
  readonly after: unknown;
  /** A source that was trained on must stay: the run's position in it would be lost. */
  readonly isRefused: boolean;
}

/** The differences between two mixtures, by source and key. Null where one of the two is no mixture. */
export function mixtureChanges(
  before: readonly MixedSource[] | null,
  after: readonly MixedSource[] | null,
): MixtureChange[] | null {
  if (before === null || after === null) return null;
  const changes: MixtureChange[] = [];
  for (const one of before) {
    const now = after.find(({ name }) => name === one.name);
    const key = `data.sources.${one.name}`;
    if (now === undefined) changes.push({ key, before: one, after: undefined, isRefused: true });
    else
      for (const field of ['source', 'path', 'weight', 'epochs'] as const)
        if (one[field] !== now[field])
          changes.push({ key: `${key}.${field}`, before: one[field], after: now[field], isRefused: false });
  }
  for (const one of after)
    if (!before.some(({ name }) => name === one.name))
      changes.push({ key: `data.sources.${one.name}`, before: undefined, after: one, isRefused: false });
  return changes;
}
