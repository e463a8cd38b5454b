/** Calls of tools as a grammar: the form is that of the chat template, the arguments are documents of the tools' schemas. */
import { byteString, utf8 } from '../../bytes.js';
import { type AnswerForm, type CallForm, ID_LENGTH, REASONING, type WithIds } from '../../data/answer-form.js';
import { UsageError } from '../../errors.js';
import { GrammarBuilder, type Node } from './grammar.js';
import { type Grammar, type JsonSchema, SchemaRules } from './schema.js';

/**
 * A tool that can be called.
 * @opaque
 */
export interface CallableTool {
  readonly name: string;
  /** JSON schema of the arguments, an object. */
  readonly schema: JsonSchema;
  /** Its place in a request, for messages. Default: that among the tools that may be called. */
  readonly place?: string;
}

/**
 * The form of a text that may or must call tools.
 *
 * @opaque
 */
export interface ToolCalls {
  readonly type: 'tool_calls';
  readonly form: AnswerForm;
  readonly tools: readonly CallableTool[];
  /** Whether the text must be calls. Otherwise it is free until the marker of a call. */
  readonly isRequired: boolean;
  /** Whether several calls may follow one another. */
  readonly isParallel: boolean;
  /** The text is calls or a document of this schema; null: calls or free text. */
  readonly document: JsonSchema | null;
}

/** Grammars of one request. */
export interface CallGrammars {
  /** Calls, or the document, from their first byte. Not the first rule of the grammar if `closed` is used. */
  readonly whole: Grammar;
  /** The end of the reasoning, and then the same. */
  readonly closed: Grammar;
  /** A call from behind its marker. */
  readonly opened: Grammar;
}

export function compileCalls({ form, tools, isParallel, document }: ToolCalls): CallGrammars {
  const { calls } = form;
  if (!calls) throw new Error('tools need a form of calls');
  const builder = new GrammarBuilder();
  const rules = new SchemaRules(builder);
  const [whole, opened, name, after] = [builder.node(), builder.node(), builder.node(), builder.node()];
  builder.literal(builder.literal(whole, bytesOf(calls.marker)), bytesOf(calls.open)).empty.push(name);
  builder.literal(opened, bytesOf(calls.open)).empty.push(name);
  const places = tools.map((tool, i) => `${tool.place ?? `tools.${i}`} (${tool.name})`);
  const schemas = tools.map(({ schema }, i) => named(places[i], () => rules.of(objectSchema(schema))));
  builder.literals(
    name,
    tools.map((tool, i) => {
      const start = builder.node();
      builder.call(withIds(builder, start, calls.middle), schemas[i]).empty.push(after);
      return [bytesOf(tool.name), start];
    }),
  );
  withIds(builder, after, calls.end).isEnd = true;
  if (isParallel && calls.between) withIds(builder, after, calls.between).empty.push(name);
  if (document !== null) {
    const end = builder.node({ isEnd: true });
    whole.calls.push({ rule: named('response_format', () => rules.of(document)), after: end });
  }
  const closed = closing(builder, whole);
  builder.finish(closed);
  for (const [i, schema] of schemas.entries())
    if (schema.close === null) throw new UsageError(`${places[i]}: the schema allows no finite document`);
  const size = builder.nodes.length;
  return { whole: { root: whole, size }, closed: { root: closed, size }, opened: { root: opened, size } };
}

/** A rule that ends the reasoning before `rule`. */
export function closing(builder: GrammarBuilder, rule: Node): Node {
  const start = builder.node();
  const closed = builder.literal(start, REASONING.close);
  const end = builder.node({ isEnd: true });
  closed.calls.push({ rule, after: end });
  builder.literal(closed, '\n\n').calls.push({ rule, after: end });
  return start;
}

/** Arguments are an object, also where a schema does not say so. */
function objectSchema(schema: JsonSchema): JsonSchema {
  if (schema === true) return { type: 'object' };
  if (typeof schema !== 'object' || schema === null || Array.isArray(schema))
    throw new UsageError('schema: must be an object');
  const { type, $ref } = schema;
  if (type === 'object') return schema;
  if (type === undefined && !COMBINING.some((keyword) => keyword in schema)) return { ...schema, type: 'object' };
  const target = $ref === undefined ? undefined : referred(schema);
  if (typeof target === 'object' && target !== null && (target as { type?: unknown }).type === 'object') return schema;
  throw new UsageError('schema: arguments are an object: "type" must be "object"');
}

const COMBINING = ['$ref', 'anyOf', 'oneOf', 'allOf', 'enum', 'const'];

/** The schema that the first one refers to; undefined if it is not found, which its compilation refuses. */
function referred(schema: Readonly<Record<string, unknown>>): unknown {
  let at: unknown = schema;
  for (let i = 0; i < 100 && typeof (at as { $ref?: unknown })?.$ref === 'string'; i++)
    for (const [n, name] of (at as { $ref: string }).$ref.split('/').entries())
      at = n === 0 ? schema : (at as Readonly<Record<string, unknown>> | undefined)?.[name];
  return at;
}

/** Adds the texts from `from` on, with an id between each two; returns the node after them. */
function withIds(builder: GrammarBuilder, from: Node, texts: WithIds): Node {
  let at = builder.literal(from, bytesOf(texts[0]));
  for (const text of texts.slice(1)) {
    for (let i = 0; i < ID_LENGTH; i++) {
      const to = builder.node();
      for (const [low, high] of ['09', 'AZ', 'az'])
        at.edges.push({ low: low.charCodeAt(0), high: high.charCodeAt(0), to });
      at = to;
    }
    at = builder.literal(at, bytesOf(text));
  }
  return at;
}

function named<T>(place: string, work: () => T): T {
  try {
    return work();
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    throw new UsageError(`${place}: ${error.message}`, { cause: error });
  }
}

function bytesOf(text: string): string {
  return byteString(utf8(text));
}

/** All literal texts of a form: a special token is a part of a call only where one of them holds it. */
export function literalsOf(form: CallForm | null): string[] {
  if (!form) return [REASONING.close];
  return [form.marker, form.open, ...form.middle, ...(form.between ?? []), ...form.end, REASONING.close];
}

/** The form with every character a byte, as masks read it. */
export function latin1Form({ calls, reasoning }: AnswerForm): AnswerForm {
  if (!calls) return { calls, reasoning };
  const all = (texts: WithIds) => texts.map(bytesOf);
  return {
    reasoning,
    calls: {
      ...calls,
      marker: bytesOf(calls.marker),
      open: bytesOf(calls.open),
      middle: all(calls.middle),
      between: calls.between && all(calls.between),
      end: all(calls.end),
    },
  };
}
