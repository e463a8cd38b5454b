/** Checks values against JSON schemas: the definition that generated documents are compared with. */
import type { JsonSchema } from '../schema.js';

type Members = Readonly<Record<string, unknown>>;

const FORMATS: Readonly<Record<string, (text: string) => boolean>> = {
  date: (text) => /^\d{4}-\d\d-\d\d$/.test(text) && isDate(text),
  'date-time': (text) => /^\d{4}-\d\d-\d\dT/.test(text) && isDate(text.slice(0, 10)) && !Number.isNaN(Date.parse(text)),
  time: (text) => !Number.isNaN(Date.parse(`2000-01-01T${text}`)),
  uuid: (text) => /^[\da-f]{8}(-[\da-f]{4}){3}-[\da-f]{12}$/i.test(text),
  email: (text) => /^[^@\s]+@[^@\s]+\.[^@\s.]+$/.test(text),
  uri: (text) => URL.canParse(text),
  hostname: (text) => URL.canParse(`http://${text}/`),
  ipv4: (text) =>
    text.split('.').length === 4 && text.split('.').every((part) => Number(part) <= 255 && `${Number(part)}` === part),
};

function isDate(text: string): boolean {
  const date = new Date(`${text}T00:00:00Z`);
  return !Number.isNaN(date.getTime()) && date.toISOString().slice(0, 10) === text;
}

export function isValid(value: unknown, schema: unknown, root: unknown = schema): boolean {
  if (typeof schema === 'boolean') return schema;
  const of = schema as Members;
  const valid = (one: unknown, by: unknown) => isValid(one, by, root);
  const isObject = typeof value === 'object' && value !== null && !Array.isArray(value);
  if (of['nullable'] === true && value === null) return true;
  if ('$ref' in of) {
    const path = String(of['$ref']).split('/').slice(1);
    return valid(
      value,
      path.reduce((at: unknown, name) => (at as Members)[name.replaceAll('~1', '/')], root),
    );
  }
  if ('const' in of && JSON.stringify(value) !== JSON.stringify(of['const'])) return false;
  if ('enum' in of && !(of['enum'] as unknown[]).some((one) => JSON.stringify(one) === JSON.stringify(value)))
    return false;
  if ('anyOf' in of && !(of['anyOf'] as unknown[]).some((one) => valid(value, one))) return false;
  if ('oneOf' in of && (of['oneOf'] as unknown[]).filter((one) => valid(value, one)).length !== 1) return false;
  if ('allOf' in of && !(of['allOf'] as unknown[]).every((one) => valid(value, one))) return false;
  if ('type' in of) {
    const types = [of['type']].flat() as string[];
    const is = (type: string) =>
      type === 'null'
        ? value === null
        : type === 'array'
          ? Array.isArray(value)
          : type === 'object'
            ? isObject
            : type === 'integer'
              ? Number.isInteger(value)
              : typeof value === type;
    if (!types.some(is)) return false;
  }
  if (typeof value === 'number') {
    const {
      minimum = -Infinity,
      maximum = Infinity,
      exclusiveMinimum = -Infinity,
      exclusiveMaximum = Infinity,
    } = of as Record<string, number>;
    if (
      !Number.isFinite(value) ||
      value < minimum ||
      value > maximum ||
      value <= exclusiveMinimum ||
      value >= exclusiveMaximum
    )
      return false;
  }
  if (typeof value === 'string') {
    const { length } = [...value];
    const { minLength = 0, maxLength = Infinity } = of as Record<string, number>;
    if (length < minLength || length > maxLength || /\p{Surrogate}/u.test(value)) return false;
    if ('pattern' in of && !new RegExp(String(of['pattern']), 'u').test(value)) return false;
    if ('format' in of && !FORMATS[String(of['format'])](value)) return false;
  }
  if (Array.isArray(value)) {
    const { minItems = 0, maxItems = Infinity } = of as Record<string, number>;
    const first = (of['prefixItems'] ?? []) as unknown[];
    if (value.length < minItems || value.length > maxItems) return false;
    if (!value.every((item, i) => valid(item, i < first.length ? first[i] : (of['items'] ?? true)))) return false;
  }
  if (isObject) {
    const properties = (of['properties'] ?? {}) as Members;
    const members = value as Members;
    if (((of['required'] ?? []) as string[]).some((name) => !Object.hasOwn(members, name))) return false;
    for (const [name, member] of Object.entries(members))
      if (!valid(member, Object.hasOwn(properties, name) ? properties[name] : (of['additionalProperties'] ?? true)))
        return false;
  }
  return true;
}

/** Random numbers in [0, 1) from a seed. */
export function random(seed: number): () => number {
  let state = seed * 2654435761 + 1;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

/** A random schema. References point to `#/$defs/A` and `#/$defs/B`, which `randomDocument` adds. */
export function randomSchema(next: () => number, depth: number, hasRefs: boolean): JsonSchema {
  const whole = (most: number) => Math.floor(next() * most);
  const some = (p: number, members: object) => (next() < p ? members : {});
  const inner = () => randomSchema(next, depth - 1, hasRefs);
  const names = ['a', 'ab', 'é"x', 'name', 'a b', 'x\\y', ''];
  const kinds = ['string', 'string', 'number', 'integer', 'literal', 'boolean', 'null', 'types', 'pattern', 'format'];
  const deep =
    depth > 0
      ? [
          'object',
          'object',
          'object',
          'array',
          'array',
          'tuple',
          'anyOf',
          'oneOf',
          'any',
          ...(hasRefs ? ['ref', 'ref'] : []),
        ]
      : [];
  const kind = [...kinds, ...deep][whole(kinds.length + deep.length)];
  const bounds = () => {
    const low = [0, -5, 3, 0.25, -1000, 17, 123456][whole(7)];
    const high = low + [0.5, 1, 7, 1000, 1e9][whole(5)];
    return {
      ...some(0.6, next() < 0.3 ? { exclusiveMinimum: low } : { minimum: low }),
      ...some(0.6, next() < 0.3 ? { exclusiveMaximum: high } : { maximum: high }),
    };
  };
  switch (kind) {
    case 'string': {
      const least = whole(6);
      return { type: 'string', ...some(0.4, { minLength: least }), ...some(0.4, { maxLength: least + whole(9) }) };
    }
    case 'number':
      return { type: 'number', ...bounds() };
    case 'integer': {
      const low = [-20, 0, 7, 99, -1234567][whole(5)];
      return {
        type: 'integer',
        ...some(0.5, { minimum: low }),
        ...some(0.5, { maximum: low + whole(2) * whole(5000) }),
      };
    }
    case 'literal':
      return next() < 0.3
        ? { const: ['x', 3, null, { a: [1] }][whole(4)] }
        : { enum: ['red', 'réd "q"', 7, true, null].slice(whole(4)) };
    case 'boolean':
    case 'null':
      return { type: kind, title: 'annotation' };
    case 'types':
      return next() < 0.5 ? { type: ['string', 'null'], maxLength: 5 } : { type: 'integer', nullable: true };
    case 'pattern':
      return {
        type: 'string',
        pattern: [
          '^[A-Z]{3}-\\d{2,4}$',
          'a+b',
          '^(?:yes|no|\\w+!)$',
          '^[^a-z"]*$',
          '^.{2}$|^x',
          '[é-ü]{1,2}$',
          '^\\S+\\s\\n?$',
        ][whole(7)],
      };
    case 'format':
      return { type: 'string', format: Object.keys(FORMATS)[whole(6)] };
    case 'object': {
      const chosen = names.filter(() => next() < 0.4);
      const required = chosen.filter(() => next() < 0.5);
      const additional = [
        {},
        { additionalProperties: false },
        { additionalProperties: true },
        { additionalProperties: inner() },
      ][whole(4)];
      return {
        type: 'object',
        properties: Object.fromEntries(chosen.map((name) => [name, inner()])),
        required,
        ...additional,
      };
    }
    case 'array': {
      const least = whole(3);
      return {
        type: 'array',
        items: inner(),
        ...some(0.4, { minItems: least }),
        ...some(0.4, { maxItems: least + whole(4) }),
      };
    }
    case 'tuple':
      return {
        type: 'array',
        prefixItems: [inner(), inner()],
        items: next() < 0.5 ? false : inner(),
        minItems: whole(3),
      };
    case 'anyOf':
      return { anyOf: [inner(), inner(), inner()] };
    case 'oneOf':
      return {
        oneOf: [
          { type: 'string' },
          { type: 'object', properties: { kind: { const: 'p' }, v: inner() }, required: ['kind'] },
          { type: 'object', properties: { kind: { enum: ['q', 'r'] } }, required: ['kind'] },
        ],
      };
    case 'ref':
      return { $ref: `#/$defs/${next() < 0.5 ? 'A' : 'B'}` };
    default:
      return true;
  }
}

/** A random schema with definitions that refer to each other. */
export function randomDocument(next: () => number): JsonSchema {
  const root = randomSchema(next, 3, true);
  const list = {
    anyOf: [
      { type: 'null' },
      {
        type: 'object',
        properties: { value: randomSchema(next, 1, false), next: { $ref: '#/$defs/A' } },
        required: ['value', 'next'],
        additionalProperties: false,
      },
    ],
  };
  const tree = { type: 'array', items: { $ref: '#/$defs/B' }, maxItems: 3 };
  return typeof root === 'boolean' ? root : { ...root, $defs: { A: list, B: tree } };
}
