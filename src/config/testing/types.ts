/**
 * The source of ../types.ts, from the schema: one documented property per key. The types that zod infers carry no
 * comments, so an editor could not show what a key means. `TREFOIL_UPDATE_TYPES=1 npx vitest run src/config/types.test.ts`
 * rewrites the file.
 */
import { z } from 'zod';
import { configShape } from '../schema.js';

interface KeySchema {
  readonly type?: string | readonly string[];
  readonly enum?: readonly (string | number)[];
  readonly anyOf?: readonly KeySchema[];
  readonly prefixItems?: readonly KeySchema[];
  readonly description?: string;
  readonly default?: unknown;
  readonly properties?: Readonly<Record<string, KeySchema>>;
}

const SECTIONS: Readonly<Record<string, string>> = {
  model: 'The shape of the model.',
  nsa: 'The sparse attention of the model.',
  data: 'Where tokens come from.',
  runtime: 'How and on what to compute.',
  train: 'The training run.',
};

export function configTypes(): string {
  const { properties = {} } = z.toJSONSchema(configShape, { io: 'output' }) as KeySchema;
  const names = Object.keys(properties).map((section) => [
    section,
    `${section[0].toUpperCase()}${section.slice(1)}Config`,
  ]);
  const sections = names.map(([section, name]) => {
    const keys = Object.entries(properties[section].properties ?? {}).map(([key, schema]) => property(key, schema));
    return `/** Section \`${section}\` of a config. ${SECTIONS[section]} */\nexport interface ${name} {\n${keys.join('\n')}\n}\n`;
  });
  const members = names.map(([section, name]) => `  /** ${SECTIONS[section]} */\n  ${section}: ${name};`);
  const inputs = names.map(
    ([section, name]) => `  /** ${SECTIONS[section]} */\n  ${section}?: Omissible<${name}> | undefined;`,
  );
  return [
    '/** The types of a config, generated from schema.ts (testing/types.ts). */\n',
    ...sections,
    `/** A whole config: every key has a value. */\nexport interface Config {\n${members.join('\n')}\n}\n`,
    `/** A section in which every key may be omitted. */\nexport type Omissible<T> = { [K in keyof T]?: T[K] | undefined };\n`,
    `/** A config as it is written down: every key may be omitted. */\nexport interface ConfigInput {\n${inputs.join('\n')}\n}\n`,
  ].join('\n');
}

function property(key: string, schema: KeySchema): string {
  const meaning = (schema.description ?? '').replace(/^./, (letter) => letter.toUpperCase());
  const text = `/** ${meaning}. Default: \`${JSON.stringify(schema.default)}\`. */`.replaceAll('"', "'");
  return `  ${text}\n  ${key}: ${typeOf(schema)};`;
}

function typeOf({ type, enum: values, anyOf, prefixItems }: KeySchema): string {
  if (values) return values.map((value) => (typeof value === 'string' ? `'${value}'` : value)).join(' | ');
  if (anyOf) return anyOf.map(typeOf).join(' | ');
  if (prefixItems) return `[${prefixItems.map(typeOf).join(', ')}]`;
  if (Array.isArray(type)) return type.map((one: string) => typeOf({ type: one })).join(' | ');
  if (type === 'integer') return 'number';
  if (type === 'string' || type === 'number' || type === 'boolean' || type === 'null') return type;
  throw new Error(`no type for ${JSON.stringify({ type, values, anyOf, prefixItems })}`);
}
