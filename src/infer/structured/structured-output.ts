/** Structured output: response formats, compiled once and kept, as token masks. */
import { areSameBytes, byteString, bytesOfString, joinBytes, utf8 } from '../../bytes.js';
import { type AnswerForm, REASONING } from '../../data/answer-form.js';
import type { Tokenizer } from '../../data/tokenizer.js';
import { UsageError } from '../../errors.js';
import { sha256 } from '../../sha256.js';
import { closing, compileCalls, latin1Form, literalsOf, type ToolCalls } from './calls.js';
import { FreeMask } from './free-mask.js';
import { GrammarBuilder } from './grammar.js';
import { InnerTokenCache, type MaskCaches, type MaskOptions, StructuredMask } from './mask.js';
import { compileSchema, type Grammar, type JsonSchema, SchemaRules } from './schema.js';
import { createTokenTree } from './vocabulary.js';

/** The form that a generated text must have: any JSON object, a document of a JSON schema, or calls of tools. */
export type ResponseFormat =
  | { readonly type: 'json_object'; readonly afterReasoning?: boolean }
  /** `afterReasoning`: the text begins inside of the model's reasoning, and the document comes after it. */
  | { readonly type: 'json_schema'; readonly schema: JsonSchema; readonly afterReasoning?: boolean }
  | ToolCalls;

interface CompiledFormat {
  /** The text from its first byte. */
  readonly whole: Grammar;
  /** The end of the reasoning, then the text; null if it does not begin with reasoning. */
  readonly closed: Grammar | null;
  /** A call from behind its marker; null if the text is never free. */
  readonly opened: Grammar | null;
  /** Where the text may be free, the form that it is read in, with a character for each byte. */
  readonly form: AnswerForm;
  readonly inner: MaskOptions['grammarInner'];
  /** Masks of its grammars, kept for the formats that were used last. */
  readonly caches: MaskCaches;
  readonly specials: ReadonlyMap<number, string>;
}

type FormatMask = StructuredMask | FreeMask;

const MAX_FORMATS = 64;
/** Formats whose caches are kept. */
const MAX_CACHES = 8;
/** Nodes of all compiled formats that are kept. */
const MAX_KEPT_NODES = 100_000;
/** For texts that are drawn before the first request. */
const WARM_UP: readonly JsonSchema[] = [
  { type: 'object' },
  {
    type: 'object',
    properties: { a: { type: 'integer', minimum: 0, maximum: 150 }, b: { type: 'string', maxLength: 400 } },
    required: ['a', 'b'],
    additionalProperties: false,
  },
];
const WARM_UP_TOKENS = 60;
/** Longer formats are known by their hash. */
const LONG_KEY = 1000;

/** Response formats for the texts of one model. */
export class StructuredOutput {
  readonly #tokenizer: Tokenizer;
  readonly #vocabulary: number;
  readonly #endTokens: readonly number[];
  readonly #formats = new Map<string, CompiledFormat>();
  #inner: InnerTokenCache | null = null;
  #specials: ReadonlyMap<number, string> | null = null;

  /** `vocabulary`: only tokens below it may be drawn. */
  constructor(tokenizer: Tokenizer, vocabulary: number, endTokens: readonly number[]) {
    this.#tokenizer = tokenizer;
    this.#vocabulary = vocabulary;
    this.#endTokens = endTokens;
  }

  /** The mask of a text of at most `budget` tokens. Throws a `UsageError` if the format has no such text. */
  mask(format: ResponseFormat, budget: number): FormatMask {
    const compiled = this.#compiled(format);
    const mask = this.#maskOf(compiled, budget);
    const { fewestTokens } = mask;
    if (fewestTokens === Number.POSITIVE_INFINITY)
      throw new UsageError(
        `${fieldOf(format)}: tokenizer ${this.#tokenizer.name} cannot write a document of this format`,
      );
    if (fewestTokens > budget)
      throw new UsageError(
        `${fieldOf(format)}: the shortest document has ${fewestTokens} tokens, and at most ${budget} may be generated; allow more tokens`,
      );
    return mask;
  }

  /** Builds the tree of tokens, and runs the code of masks until it is compiled: a first text would take many times as long. */
  warmUp(): void {
    if (!this.#tokenizer.tokenBytes) return; // no structured output
    const logits = new Float32Array(this.#vocabulary);
    const draw = (from: number) => {
      for (let i = from; i < from + logits.length; i++) if (logits[i % logits.length] === 0) return i % logits.length;
      return -1;
    };
    for (const [text, schema] of [...WARM_UP, ...WARM_UP].entries()) {
      const mask = this.#maskOf(this.#compiled({ type: 'json_schema', schema }), WARM_UP_TOKENS);
      if (mask.fewestTokens > WARM_UP_TOKENS) return;
      for (let n = 0; n < WARM_UP_TOKENS && !mask.isComplete; n++) {
        logits.fill(0);
        mask.apply(logits);
        let token = draw((text + n) * 7919);
        if (token >= 0 && mask.narrow(token, logits)) token = draw(token);
        if (token < 0 || this.#endTokens.includes(token)) break;
        mask.accept(token);
      }
    }
    this.#formats.clear();
  }

  /** Throws what `mask` would throw. Cheaper where it is clear that the document fits. */
  check(format: ResponseFormat, budget: number): void {
    const { whole, closed, opened } = this.#compiled(format);
    if (opened) return; // a free text fits in any case
    const close = bytesOfString((closed ?? whole).root.close ?? '');
    const tokens = Array.from(this.#tokenizer.encode(new TextDecoder('utf-8', { ignoreBOM: true }).decode(close)));
    const pieces = tokens.map((token) => this.#tokenizer.tokenBytes?.(token) ?? new Uint8Array());
    if (tokens.length > budget || !areSameBytes(joinBytes(pieces), close)) this.mask(format, budget);
  }

  #maskOf(
    { whole, closed, opened, form, inner: grammarInner, caches, specials }: CompiledFormat,
    budget: number,
  ): FormatMask {
    // Built at the first use: most servers never need it, and it takes a fraction of a second for a large vocabulary.
    this.#inner ??= new InnerTokenCache(createTokenTree(this.#tokenizer, this.#vocabulary));
    const inner = this.#inner;
    const { tree } = inner;
    const endTokens = this.#endTokens;
    const begin = (grammar: Grammar, budget: number, written: string) =>
      new StructuredMask({ grammar, grammarInner, inner, caches, endTokens, budget, specials, written });
    if (!opened && !closed) return begin(whole, budget, '');
    const texts = this.#specialTexts();
    const bytesOf = (token: number) => tree.bytes(token) ?? texts.get(token) ?? '';
    const start = opened
      ? { at: 'call' as const, form, grammar: opened }
      : { at: 'end of reasoning' as const, grammar: closed ?? whole };
    return new FreeMask({ begin, bytesOf, endTokens, budget, start });
  }

  /** The texts of special tokens, a character for each byte. */
  #specialTexts(): ReadonlyMap<number, string> {
    if (this.#specials) return this.#specials;
    const { tokenBytes, decode, separator } = this.#tokenizer;
    const specials = new Map<number, string>();
    for (let token = 0; token < this.#vocabulary; token++)
      if (token !== separator && tokenBytes?.(token) === null) specials.set(token, byteString(utf8(decode([token]))));
    this.#specials = specials;
    return specials;
  }

  #compiled(format: ResponseFormat): CompiledFormat {
    const text = textOf(format);
    const key = text.length > LONG_KEY ? sha256(text) : text;
    const compiled = this.#formats.get(key) ?? this.#compile(format);
    // The least recently used format is the first of the map.
    this.#formats.delete(key);
    this.#formats.set(key, compiled);
    for (const { caches } of [...this.#formats.values()].slice(0, -MAX_CACHES)) caches.clear();
    let nodes = [...this.#formats.values()].reduce((sum, { whole }) => sum + whole.size, 0);
    for (const [first, { whole }] of this.#formats) {
      if (first === key || (this.#formats.size <= MAX_FORMATS && nodes <= MAX_KEPT_NODES)) break;
      this.#formats.delete(first);
      nodes -= whole.size;
    }
    return compiled;
  }

  #compile(format: ResponseFormat): CompiledFormat {
    const [inner, caches] = [new Map(), new Map()];
    const none = { calls: null, reasoning: null };
    if (format.type !== 'tool_calls') {
      const schema = format.type === 'json_object' ? { type: 'object' } : format.schema;
      if (!format.afterReasoning)
        return {
          whole: compileSchema(schema),
          closed: null,
          opened: null,
          form: none,
          inner,
          caches,
          specials: new Map(),
        };
      const builder = new GrammarBuilder();
      const closed = closing(builder, new SchemaRules(builder).of(schema));
      builder.finish(closed);
      const grammar = { root: closed, size: builder.nodes.length };
      return {
        whole: grammar,
        closed: grammar,
        opened: null,
        form: none,
        inner,
        caches,
        specials: this.#specialsIn([]),
      };
    }
    const { form, isRequired, document } = format;
    const { whole, closed, opened } = compileCalls(format);
    const isFree = !isRequired && document === null;
    return {
      whole,
      closed: !isFree && form.reasoning === 'open' ? closed : null,
      opened: isFree ? opened : null,
      form: latin1Form(form),
      inner,
      caches,
      specials: this.#specialsIn(literalsOf(form.calls)),
    };
  }

  /** Special tokens that are a part of these texts or end reasoning, but for those that end a text. */
  #specialsIn(texts: readonly string[]): ReadonlyMap<number, string> {
    const all = [...texts, REASONING.close].map((text) => byteString(utf8(text)));
    const isPart = (text: string) => text !== '' && all.some((one) => one.includes(text));
    const found = [...this.#specialTexts()].filter(([token, text]) => !this.#endTokens.includes(token) && isPart(text));
    return new Map(found);
  }
}

/** The field of the API that a format comes from. */
function fieldOf({ type }: ResponseFormat): string {
  return type === 'tool_calls' ? 'tools' : 'response_format';
}

function textOf(format: ResponseFormat): string {
  try {
    return JSON.stringify(format);
  } catch (error) {
    throw new UsageError('schema: it is nested deeper than can be read, or contains itself', { cause: error });
  }
}
