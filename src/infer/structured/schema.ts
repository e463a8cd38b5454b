/** JSON schemas as grammars. A keyword that is not supported is an error; none is ignored but annotations. */
import { byteString, utf8 } from '../../bytes.js';
import { UsageError } from '../../errors.js';
import { GrammarBuilder, type Node } from './grammar.js';
import { NumberMachine } from './number.js';
import { addPattern } from './pattern.js';
import { TextMachine, type TextOptions } from './text.js';

/** A JSON schema. */
export type JsonSchema = boolean | { readonly [keyword: string]: unknown };

/** A grammar: its nodes and the rule of a whole document. */
export interface Grammar {
  readonly root: Node;
  /** Number of its nodes. */
  readonly size: number;
}

const ANNOTATIONS = new Set(
  [
    'title',
    'description',
    'default',
    'examples',
    'example',
    'deprecated',
    'readOnly',
    'writeOnly',
    'discriminator',
    'contentEncoding',
    'contentMediaType',
  ].concat(['$schema', '$id', '$comment', '$anchor', '$defs', 'definitions']),
);
const TYPES = ['object', 'array', 'string', 'number', 'integer', 'boolean', 'null'] as const;
type Type = (typeof TYPES)[number];
/** Keywords of one type. Those of other types do not apply to its values. */
const KEYWORDS: Readonly<Record<Type, readonly string[]>> = {
  object: ['properties', 'required', 'additionalProperties', 'propertyNames'],
  array: ['items', 'prefixItems', 'minItems', 'maxItems', 'uniqueItems'],
  string: ['minLength', 'maxLength', 'pattern', 'format'],
  number: ['minimum', 'maximum', 'exclusiveMinimum', 'exclusiveMaximum'],
  integer: ['minimum', 'maximum', 'exclusiveMinimum', 'exclusiveMaximum'],
  boolean: [],
  null: [],
};
const OF_TYPES = new Set(Object.values(KEYWORDS).flat());
const COMBINING = ['$ref', 'anyOf', 'oneOf', 'allOf', 'enum', 'const'];

const DAY =
  '(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|02-(?:0[1-9]|1\\d|2[0-8]))';
const TIME = '(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d{1,6})?(?:Z|[+-](?:[01]\\d|2[0-3]):[0-5]\\d)';
const BYTE = '(?:\\d|[1-9]\\d|1\\d\\d|2[0-4]\\d|25[0-5])';
const NAMES = '(?:[A-Za-z0-9]{1,24}[.-]){0,5}[A-Za-z]{2,24}';
const URI_TEXT = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-F]{2})*";
const FORMATS: Readonly<Record<string, string>> = {
  date: `^\\d{4}-${DAY}$`,
  time: `^${TIME}$`,
  'date-time': `^\\d{4}-${DAY}T${TIME}$`,
  uuid: '^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$',
  email:
    '^[A-Za-z0-9_+-]{1,24}(?:\\.[A-Za-z0-9_+-]{1,24}){0,3}@[A-Za-z0-9]{1,24}(?:[.-][A-Za-z0-9]{1,24}){0,3}\\.[A-Za-z]{2,12}$',
  ipv4: `^${BYTE}(?:\\.${BYTE}){3}$`,
  uri: `^https?://${NAMES}(?::[1-9]\\d{0,3})?(?:/${URI_TEXT})*(?:\\?${URI_TEXT})?(?:#${URI_TEXT})?$`,
  hostname: `^${NAMES}$`,
};

const MAX_DEPTH = 100;
const MAX_ITEMS = 10_000;
/** Options of `oneOf`: each is compared with all others. */
const MAX_ONE_OF = 256;
const MAX_LENGTH = 100_000;
/** Columns of indentation after a line end. */
const MAX_INDENT = 20;

/** Throws a `UsageError` that names the keyword and its place. */
export function compileSchema(schema: JsonSchema): Grammar {
  const builder = new GrammarBuilder();
  const root = new SchemaRules(builder).of(schema);
  builder.finish(root);
  return { root, size: builder.nodes.length };
}

/** The rules of several schemas in one grammar. */
export class SchemaRules {
  readonly #builder: GrammarBuilder;
  readonly #shared: SharedRules;

  constructor(builder: GrammarBuilder) {
    this.#builder = builder;
    this.#shared = { space: spaceRule(builder), anyValue: null, text: null };
  }

  /** The rule of a document. Throws a `UsageError` that names the keyword and its place. */
  of(schema: JsonSchema): Node {
    return new SchemaCompiler(schema, this.#builder, this.#shared).compile();
  }
}

/** Rules that are the same for all schemas, and are made when they are needed. */
interface SharedRules {
  readonly space: Node;
  anyValue: Node | null;
  text: Node | null;
}

type Members = Readonly<Record<string, unknown>>;

class SchemaCompiler {
  readonly #document: JsonSchema;
  readonly #builder: GrammarBuilder;
  readonly #shared: SharedRules;
  readonly #rules = new Map<object, Node>();
  #depth = 0;

  constructor(document: JsonSchema, builder: GrammarBuilder, shared: SharedRules) {
    this.#document = document;
    this.#builder = builder;
    this.#shared = shared;
  }

  compile(): Node {
    return this.#rule(this.#document, '');
  }

  /** The rule of a schema at the JSON pointer `at`. */
  #rule(schema: unknown, at: string): Node {
    if (schema === true) return this.#any();
    if (schema === false) return this.#builder.node(); // reaches no end
    const members = object(schema, at);
    const known = this.#rules.get(members);
    if (known) return known;
    this.#depth += 1;
    if (this.#depth > MAX_DEPTH) throw new UsageError(`${at}: the schema is nested deeper than ${MAX_DEPTH} levels`);
    const start = this.#builder.node();
    this.#rules.set(members, start);
    const end = this.#builder.node({ isEnd: true });
    this.#value(members, at, start, end);
    if (members['nullable'] === true) this.#builder.literal(start, 'null').empty.push(end);
    this.#depth -= 1;
    return start;
  }

  #value(schema: Members, at: string, start: Node, end: Node): void {
    const combining = COMBINING.filter((name) => name in schema);
    const others = Object.keys(schema).filter((name) => !ANNOTATIONS.has(name) && name !== 'nullable');
    const [name] = combining;
    const isLiteral = name === 'enum' || name === 'const';
    for (const keyword of others) {
      const isKnown = keyword === 'type' || OF_TYPES.has(keyword) || COMBINING.includes(keyword);
      if (!isKnown) throw unsupported(keyword, at);
      if (name !== undefined && keyword !== name && !(isLiteral && keyword === 'type'))
        throw new UsageError(`${place(at)}: "${keyword}" beside "${name}" is not supported`);
    }
    if (name === undefined) for (const type of typesOf(schema, at)) this.#typed(type, schema, at, start, end);
    else if (isLiteral) this.#literals(schema, at, start, end);
    else
      for (const [option, where] of this.#options(name, schema, at)) this.#call(start, this.#rule(option, where), end);
  }

  #options(name: string, schema: Members, at: string): (readonly [schema: unknown, at: string])[] {
    if (name === '$ref') return [this.#resolve(schema['$ref'], at)];
    const options = schema[name];
    if (!Array.isArray(options) || options.length === 0)
      throw new UsageError(`${place(at)}: "${name}" must be a list of schemas`);
    if (name === 'allOf' && options.length > 1)
      throw new UsageError(`${place(at)}: "allOf" of several schemas is not supported`);
    if (name === 'oneOf') this.#expectDisjoint(options, at);
    return options.map((option, i) => [option, `${at}/${name}/${i}`] as const);
  }

  /** A value must not match two options of `oneOf`; this is decided by types, constants, and required constant properties. */
  #expectDisjoint(options: readonly unknown[], at: string): void {
    if (options.length > MAX_ONE_OF)
      throw new UsageError(`${place(at)}: "oneOf" has ${options.length} options; at most ${MAX_ONE_OF}`);
    const resolved = options.map((option, i) => this.#resolved(option, `${at}/oneOf/${i}`));
    for (const [i, a] of resolved.entries())
      for (const [j, b] of resolved.slice(0, i).entries())
        if (!this.#areDisjoint(a, b, at))
          throw new UsageError(
            `${place(at)}: options ${j} and ${i} of "oneOf" may overlap; use "anyOf", or a required property with different constants`,
          );
  }

  #areDisjoint(a: Members, b: Members, at: string): boolean {
    const [left, right] = [constantsOf(a), constantsOf(b)];
    if (left && right) return left.every((value) => !right.includes(value));
    const [types, others] = [a, b].map((one) => kindsOf(one, at));
    if (types && others && types.every((type) => !others.includes(type))) return true;
    if (types?.join() !== 'object' || others?.join() !== 'object') return false;
    const required = list(a['required']).filter((name) => list(b['required']).includes(name)) as string[];
    return required.some((name) => {
      const values = [a, b].map((one) => {
        const properties = (one['properties'] ?? {}) as Members;
        return constantsOf(this.#resolved(properties[name] ?? {}, at));
      });
      return values[0] && values[1] ? values[0].every((value) => !values[1]!.includes(value)) : false;
    });
  }

  #resolved(schema: unknown, at: string): Members {
    let members = typeof schema === 'boolean' ? {} : object(schema, at);
    for (let i = 0; '$ref' in members && i < MAX_DEPTH; i++)
      members = object(this.#resolve(members['$ref'], at)[0], at);
    return members;
  }

  #resolve(ref: unknown, at: string): readonly [schema: unknown, at: string] {
    if (typeof ref !== 'string' || !/^#(\/|$)/.test(ref))
      throw new UsageError(`${place(at)}: "$ref" must point into the schema, such as #/$defs/Name`);
    let target: unknown = this.#document;
    for (const part of ref.slice(1).split('/').slice(1)) {
      const name = part.replaceAll('~1', '/').replaceAll('~0', '~');
      const isInside = typeof target === 'object' && target !== null && Object.hasOwn(target, name);
      if (!isInside) throw new UsageError(`${place(at)}: "$ref" ${JSON.stringify(ref)} points to nothing`);
      target = (target as Members)[name];
    }
    return [target, ref.slice(1)];
  }

  #literals(schema: Members, at: string, start: Node, end: Node): void {
    const values = 'const' in schema ? [schema['const']] : schema['enum'];
    if (!Array.isArray(values) || values.length === 0)
      throw new UsageError(`${place(at)}: "enum" must be a list of values`);
    const types = 'type' in schema ? typesOf(schema, at) : TYPES;
    const allowed = values.filter((value) => types.some((type) => isOfType(value, type)));
    this.#builder.literals(
      start,
      allowed.map((value) => [bytesOf(JSON.stringify(value)), end]),
    );
  }

  #typed(type: Type, schema: Members, at: string, start: Node, end: Node): void {
    const builder = this.#builder;
    if (type === 'null') builder.literal(start, 'null').empty.push(end);
    else if (type === 'boolean') for (const word of ['true', 'false']) builder.literal(start, word).empty.push(end);
    else if (type === 'string') this.#string(schema, at, start, end);
    else if (type === 'array') this.#array(schema, at, start, end);
    else if (type === 'object') this.#object(schema, at, start, end);
    else this.#number(type === 'integer', schema, at, start, end);
  }

  #string(schema: Members, at: string, start: Node, end: Node): void {
    const minLength = count(schema, 'minLength', at, MAX_LENGTH) ?? 0;
    const maxLength = count(schema, 'maxLength', at) ?? Number.POSITIVE_INFINITY;
    const { pattern, format } = schema;
    const hasLength = 'minLength' in schema || 'maxLength' in schema;
    // Libraries that write schemas give a format the pattern that it stands for.
    if ((pattern !== undefined || format !== undefined) && hasLength)
      throw new UsageError(
        `${place(at)}: minLength and maxLength are not supported together with "pattern" or "format"`,
      );
    if (pattern === undefined && format === undefined) {
      if (maxLength < minLength) return; // no text
      this.#call(start, hasLength ? this.#textRule({ minLength, maxLength }) : this.#freeText(), end);
      return;
    }
    if (pattern !== undefined && typeof pattern !== 'string')
      throw new UsageError(`${place(at)}: "pattern" must be a text`);
    if (pattern === undefined && !(typeof format === 'string' && Object.hasOwn(FORMATS, format)))
      throw new UsageError(
        `${place(at)}: "format" ${JSON.stringify(format)} is not supported; use one of ${Object.keys(FORMATS).join(', ')}`,
      );
    const open = this.#builder.literal(start, '"', true);
    const close = addPattern(this.#builder, open, pattern ?? FORMATS[format as string]);
    this.#builder.literal(close, '"').empty.push(end);
  }

  #freeText(): Node {
    this.#shared.text ??= this.#textRule({});
    return this.#shared.text;
  }

  #textRule(options: TextOptions): Node {
    const start = this.#builder.node();
    const text = this.#builder.node({ machine: new TextMachine(options) });
    this.#builder.literal(start, '"').empty.push(text);
    const end = this.#builder.node();
    text.empty.push(end);
    this.#builder.literal(end, '"').isEnd = true;
    return start;
  }

  #number(isInteger: boolean, schema: Members, at: string, start: Node, end: Node): void {
    const bounds = (inclusive: string, exclusive: string, side: 1 | -1) => {
      const given = [number(schema, inclusive, at), next(number(schema, exclusive, at), side)];
      const all = given.flatMap((bound) =>
        bound === undefined ? [] : [isInteger ? side * Math.ceil(side * bound) : bound],
      );
      return all.length === 0 ? undefined : side * Math.max(...all.map((bound) => side * bound));
    };
    const minimum = bounds('minimum', 'exclusiveMinimum', 1);
    const maximum = bounds('maximum', 'exclusiveMaximum', -1);
    const machine = new NumberMachine({
      isInteger,
      ...(minimum === undefined ? {} : { minimum }),
      ...(maximum === undefined ? {} : { maximum }),
    });
    if (!machine.isPossible) return;
    const node = this.#builder.node({ machine, isText: false });
    start.empty.push(node);
    node.empty.push(end);
  }

  #array(schema: Members, at: string, start: Node, end: Node): void {
    if (schema['uniqueItems'] !== undefined && schema['uniqueItems'] !== false) throw unsupported('uniqueItems', at);
    const least = count(schema, 'minItems', at, MAX_ITEMS) ?? 0;
    const most = count(schema, 'maxItems', at) ?? Number.POSITIVE_INFINITY;
    const first = list(schema['prefixItems']);
    const item = (i: number) =>
      i < first.length
        ? this.#rule(first[i], `${at}/prefixItems/${i}`)
        : this.#rule(schema['items'] ?? true, `${at}/items`);
    const builder = this.#builder;
    const beforeClose = builder.node();
    builder.literal(builder.call(beforeClose, this.#shared.space), ']').empty.push(end);
    const open = builder.literal(start, '[');
    if (least === 0) open.empty.push(beforeClose);
    // Positions differ up to the last that has a bound or a schema of its own; from there on a loop reads the rest.
    const last = Math.max(least, first.length, most === Number.POSITIVE_INFINITY ? 0 : Math.min(most, MAX_ITEMS + 1));
    if (last > MAX_ITEMS) throw new UsageError(`${place(at)}: "maxItems" is at most ${MAX_ITEMS}`);
    let before = open;
    for (let i = 0; i < Math.min(most, last + 1); i++) {
      const comma = i === 0 ? before : builder.literal(before, ',');
      const after = builder.call(builder.call(comma, this.#shared.space), item(i));
      if (i + 1 >= least) after.empty.push(beforeClose);
      if (i === last) this.#loop(after, builder.literal(after, ','), item(i));
      before = after;
    }
  }

  /** From `from` (after a comma) reads a space and an item, and is then `to` again. */
  #loop(to: Node, from: Node, item: Node): void {
    const spaced = this.#builder.call(from, this.#shared.space);
    spaced.calls.push({ rule: item, after: to });
  }

  #object(schema: Members, at: string, start: Node, end: Node): void {
    const { properties = {}, required = [], additionalProperties, propertyNames } = schema;
    // Names are texts: this is what libraries write for maps.
    if (propertyNames !== undefined && propertyNames !== true && !isPlainText(propertyNames))
      throw new UsageError(`${place(at)}: "propertyNames" is supported as {"type": "string"} only`);
    const declared = object(properties, `${at}/properties`);
    if (!Array.isArray(required) || required.some((name) => typeof name !== 'string'))
      throw new UsageError(`${place(at)}: "required" must be a list of names`);
    const isFree = Object.keys(declared).length === 0 && additionalProperties === undefined;
    const additional = isFree ? true : (additionalProperties ?? false);
    // A required property without a schema may have any value that additional properties may have.
    const extra = required.filter((name: string) => !Object.hasOwn(declared, name)) as string[];
    const undeclared = additionalProperties ?? true;
    const all: [name: string, rule: Node, isRequired: boolean][] = [
      ...Object.entries(declared).map(([name, value]): [string, Node, boolean] => [
        ...([name, this.#rule(value, `${at}/properties/${name}`), required.includes(name)] as const),
      ]),
      ...extra.map((name): [string, Node, boolean] => [
        name,
        this.#rule(undeclared, `${at}/additionalProperties`),
        true,
      ]),
    ];
    const builder = this.#builder;
    const beforeClose = builder.node();
    builder.literal(builder.call(beforeClose, this.#shared.space), '}').empty.push(end);
    // `empty`: no property was written yet, so none is preceded by a comma. Null where it cannot be.
    let [empty, filled]: [Node | null, Node] = [builder.literal(start, '{'), builder.node()];
    for (const [name, rule, isRequired] of all) {
      const key = builder.node();
      const value = builder.call(this.#colon(builder.literal(key, bytesOf(JSON.stringify(name)))), rule);
      if (empty) empty.calls.push({ rule: this.#shared.space, after: key });
      builder.literal(filled, ',').calls.push({ rule: this.#shared.space, after: key });
      if (isRequired) empty = null;
      else filled.empty.push(value);
      filled = value;
    }
    if (additional !== false) {
      const rule = this.#rule(additional, `${at}/additionalProperties`);
      const names = all.map(([name]) => name);
      const keyRule = names.length === 0 ? this.#freeText() : this.#textRule({ excluded: names });
      const key = builder.node();
      this.#colon(builder.call(key, keyRule)).calls.push({ rule, after: filled });
      if (empty) empty.calls.push({ rule: this.#shared.space, after: key });
      builder.literal(filled, ',').calls.push({ rule: this.#shared.space, after: key });
    }
    empty?.empty.push(beforeClose);
    filled.empty.push(beforeClose);
  }

  /** A colon and at most one space. */
  #colon(from: Node): Node {
    const colon = this.#builder.literal(from, ':');
    const after = this.#builder.literal(colon, ' ');
    colon.empty.push(after);
    return after;
  }

  #any(): Node {
    if (this.#shared.anyValue) return this.#shared.anyValue;
    const start = this.#builder.node();
    this.#shared.anyValue = start;
    const end = this.#builder.node({ isEnd: true });
    for (const type of TYPES.filter((name) => name !== 'integer')) this.#typed(type, {}, '', start, end);
    return start;
  }

  #call(from: Node, rule: Node, to: Node): void {
    from.calls.push({ rule, after: to });
  }
}

/** Nothing, one space, or a line end with indentation: what programs write, and bounded. */
function spaceRule(builder: GrammarBuilder): Node {
  const start = builder.node({ isEnd: true });
  builder.literal(start, ' ').isEnd = true;
  let at = builder.literal(start, '\n');
  at.isEnd = true;
  for (let i = 0; i < MAX_INDENT; i++) {
    const next = builder.node({ isEnd: true });
    for (const byte of [9, 32]) at.edges.push({ low: byte, high: byte, to: next });
    at = next;
  }
  return start;
}

function isPlainText(schema: unknown): boolean {
  const entries = Object.entries(schema ?? {});
  return entries.length === 1 && entries[0].join() === 'type,string';
}

function place(at: string): string {
  return at === '' ? 'schema' : `schema ${at}`;
}

function unsupported(keyword: string, at: string): UsageError {
  return new UsageError(`${place(at)}: the keyword "${keyword}" is not supported`);
}

function object(value: unknown, at: string): Members {
  if (typeof value === 'object' && value !== null && !Array.isArray(value)) return value as Members;
  throw new UsageError(`${place(at)}: must be an object`);
}

function list(value: unknown): readonly unknown[] {
  return Array.isArray(value) ? value : [];
}

function number(schema: Members, name: string, at: string): number | undefined {
  const value = schema[name];
  if (value === undefined || typeof value === 'number') return value;
  throw new UsageError(`${place(at)}: "${name}" must be a number`);
}

function count(schema: Members, name: string, at: string, most = Number.MAX_SAFE_INTEGER): number | undefined {
  const value = number(schema, name, at);
  if (value === undefined || (Number.isSafeInteger(value) && value >= 0 && value <= most)) return value;
  throw new UsageError(`${place(at)}: "${name}" must be a whole number from 0 to ${most}`);
}

/** The nearest number beyond `bound`. */
function next(bound: number | undefined, side: 1 | -1): number | undefined {
  if (bound === undefined) return undefined;
  if (bound === 0) return side * Number.MIN_VALUE;
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, bound);
  const isAway = bound > 0 === side > 0;
  view.setBigInt64(0, view.getBigInt64(0) + (isAway ? 1n : -1n));
  return view.getFloat64(0);
}

/** The types that a schema allows; those that its keywords suggest where it names none. */
function typesOf(schema: Members, at: string): readonly Type[] {
  const { type } = schema;
  if (type === undefined) {
    const suggested = TYPES.filter((name) => KEYWORDS[name].some((keyword) => keyword in schema));
    const narrowed = suggested.filter((name) => name !== 'integer');
    return narrowed.length > 0 ? narrowed : TYPES.filter((name) => name !== 'integer');
  }
  const types = Array.isArray(type) ? type : [type];
  for (const one of types)
    if (!TYPES.includes(one)) throw new UsageError(`${place(at)}: "type" ${JSON.stringify(one)} is not a type of JSON`);
  return types as Type[];
}

/** Types of a schema without options, whole numbers as numbers; null if unknown. */
function kindsOf(schema: Members, at: string): readonly string[] | null {
  const constants = constantsOf(schema);
  if (constants) return constants.map((text) => TYPES.find((type) => isOfType(JSON.parse(text), type))!);
  if (COMBINING.some((name) => name in schema) || schema['nullable'] === true) return null;
  return typesOf(schema, at).map((type) => (type === 'integer' ? 'number' : type));
}

/** The values of a constant or an enumeration as JSON; null otherwise. */
function constantsOf(schema: Members): readonly string[] | null {
  if ('const' in schema) return [JSON.stringify(schema['const'])];
  return Array.isArray(schema['enum']) ? schema['enum'].map((value) => JSON.stringify(value)) : null;
}

function isOfType(value: unknown, type: Type): boolean {
  if (type === 'null') return value === null;
  if (type === 'array') return Array.isArray(value);
  if (type === 'integer') return Number.isInteger(value);
  if (type === 'object') return typeof value === 'object' && value !== null && !Array.isArray(value);
  return typeof value === type;
}

function bytesOf(text: string): string {
  return byteString(utf8(text));
}
