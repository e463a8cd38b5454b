/** The schema as a flat table of keys such as `train.lr`, for messages, environment, flags and the printed config. */
import * as z from '../zod.js';
import { MIXTURE_ALLOWED } from './mixture.js';
import { configShape } from './schema.js';

export type KeyKind = 'integer' | 'number' | 'boolean' | 'text' | 'choice' | 'list' | 'mapping';

export interface ConfigKey {
  path: string;
  kind: KeyKind;
  /** Null is allowed. */
  nullable: boolean;
  /** Allowed values of a choice; empty for other kinds. */
  choices: readonly string[];
  /** Description of the allowed values. */
  allowed: string;
  default: unknown;
}

/** The subset of JSON Schema that zod generates for these keys. */
interface JsonSchema {
  type?: string | string[];
  properties?: Record<string, JsonSchema>;
  prefixItems?: JsonSchema[];
  items?: JsonSchema;
  minItems?: number;
  anyOf?: JsonSchema[];
  enum?: (string | number)[];
  const?: number;
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  exclusiveMaximum?: number;
  default?: unknown;
}

function limits(schema: JsonSchema): string {
  // zod adds the safe-integer range as limits; it is of no use in a message.
  const minimum = schema.minimum === Number.MIN_SAFE_INTEGER ? undefined : schema.minimum;
  const maximum = schema.maximum === Number.MAX_SAFE_INTEGER ? undefined : schema.maximum;
  const bounds = [
    ...(minimum === undefined ? [] : [`>= ${minimum}`]),
    ...(schema.exclusiveMinimum === undefined ? [] : [`> ${schema.exclusiveMinimum}`]),
    ...(maximum === undefined ? [] : [`<= ${maximum}`]),
    ...(schema.exclusiveMaximum === undefined ? [] : [`< ${schema.exclusiveMaximum}`]),
  ];
  return bounds.length === 0 ? '' : ` ${bounds.join(' and ')}`;
}

function kindOf(schema: JsonSchema): KeyKind {
  if (schema.enum !== undefined) return 'choice';
  if (schema.type === 'array') return 'list';
  if (schema.type === 'object') return 'mapping';
  if (schema.type === 'string') return 'text';
  if (schema.type === 'integer' || schema.type === 'number' || schema.type === 'boolean') return schema.type;
  throw new Error(`unsupported schema: ${JSON.stringify(schema)}`);
}

function allowedBy(schema: JsonSchema): string {
  if (schema.const !== undefined) return String(schema.const);
  switch (kindOf(schema)) {
    case 'choice':
      return `one of ${schema.enum!.join(', ')}`;
    case 'list':
      if (schema.items?.type === 'object') return MIXTURE_ALLOWED;
      if (schema.items) return `a list of ${schema.minItems} or more, each ${allowedBy(schema.items)}`;
      return `a list of ${schema.prefixItems!.length}, each ${allowedBy(schema.prefixItems![0])}`;
    case 'mapping':
      return `a mapping of ${Object.entries(schema.properties!)
        .map(([name, key]) => `${name} (${allowedBy(key)})`)
        .join(', ')}`;
    case 'boolean':
      return 'true or false';
    case 'text':
      return 'a non-empty text';
    case 'integer':
      return `an integer${limits(schema)}`;
    case 'number':
      return `a number${limits(schema)}`;
  }
}

/** zod expresses "or null" as a list of types, or as `anyOf` where that is not possible. */
function withoutNull(schema: JsonSchema): { value: JsonSchema; nullable: boolean } {
  if (Array.isArray(schema.type)) {
    return { value: { ...schema, type: schema.type.find((type) => type !== 'null')! }, nullable: true };
  }
  const value = schema.anyOf?.find((option) => option.type !== 'null');
  return { value: value ?? schema, nullable: value !== undefined };
}

function describeKey(path: string, schema: JsonSchema): ConfigKey {
  const { value, nullable } = withoutNull(schema);
  return {
    path,
    kind: kindOf(value),
    nullable,
    choices: value.enum?.map(String) ?? [],
    allowed: allowedBy(value) + (nullable ? ', or null' : ''),
    default: schema.default,
  };
}

/** Every key, in schema order. */
export const configKeys: readonly ConfigKey[] = Object.entries(
  (z.toJSONSchema(configShape, { io: 'input' }) as JsonSchema).properties!,
).flatMap(([section, schema]) =>
  Object.entries(schema.properties!).map(([name, key]) => describeKey(`${section}.${name}`, key)),
);

export const configSections: readonly string[] = Object.keys(configShape.shape);

const byPath: ReadonlyMap<string, ConfigKey> = new Map(configKeys.map((key) => [key.path, key]));

export function findKey(path: string): ConfigKey | undefined {
  return byPath.get(path);
}

/** The names of the keys of a section, without the section. */
export function keysOf(section: string): string[] {
  return configKeys
    .filter((key) => key.path.startsWith(`${section}.`))
    .map((key) => key.path.slice(section.length + 1));
}
