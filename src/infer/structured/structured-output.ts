/** Structured output: response formats, compiled once and kept, as token masks. */
import type { Tokenizer } from '../../data/tokenizer.js';
import { UsageError } from '../../errors.js';
import { InnerTokenCache, type MaskOptions, StructuredMask } from './mask.js';
import { compileSchema, type Grammar, type JsonSchema } from './schema.js';
import { createTokenTree } from './vocabulary.js';

/** The form that a generated text must have: any JSON object, or a document of a JSON schema. */
export type ResponseFormat =
  | { readonly type: 'json_object' }
  | { readonly type: 'json_schema'; readonly schema: JsonSchema };

interface CompiledFormat {
  readonly grammar: Grammar;
  readonly inner: MaskOptions['grammarInner'];
}

const MAX_FORMATS = 64;

/** Response formats for the texts of one model. */
export class StructuredOutput {
  readonly #tokenizer: Tokenizer;
  readonly #vocabulary: number;
  readonly #endTokens: readonly number[];
  readonly #formats = new Map<string, CompiledFormat>();
  #inner: InnerTokenCache | null = null;

  /** `vocabulary`: only tokens below it may be drawn. */
  constructor(tokenizer: Tokenizer, vocabulary: number, endTokens: readonly number[]) {
    this.#tokenizer = tokenizer;
    this.#vocabulary = vocabulary;
    this.#endTokens = endTokens;
  }

  /** The mask of a text of at most `budget` tokens. Throws a `UsageError` if the format has no such text. */
  mask(format: ResponseFormat, budget: number): StructuredMask {
    const { grammar, inner: grammarInner } = this.#compiled(format);
    // Built at the first use: most servers never need it, and it takes a fraction of a second for a large vocabulary.
    this.#inner ??= new InnerTokenCache(createTokenTree(this.#tokenizer, this.#vocabulary));
    const mask = new StructuredMask({ grammar, grammarInner, inner: this.#inner, endTokens: this.#endTokens, budget });
    const { fewestTokens } = mask;
    if (fewestTokens === Number.POSITIVE_INFINITY)
      throw new UsageError(`response_format: tokenizer ${this.#tokenizer.name} cannot write a document of this format`);
    if (fewestTokens > budget)
      throw new UsageError(
        `response_format: the shortest document has ${fewestTokens} tokens, and at most ${budget} may be generated; allow more tokens`,
      );
    return mask;
  }

  /** Throws what `mask` would throw. Cheaper where it is clear that the document fits. */
  check(format: ResponseFormat, budget: number): void {
    const close = Buffer.from(this.#compiled(format).grammar.root.close ?? '', 'latin1');
    const tokens = Array.from(this.#tokenizer.encode(close.toString('utf8')));
    const pieces = tokens.map((token) => this.#tokenizer.tokenBytes?.(token) ?? new Uint8Array());
    if (tokens.length > budget || !Buffer.concat(pieces).equals(close)) this.mask(format, budget);
  }

  #compiled(format: ResponseFormat): CompiledFormat {
    const schema = format.type === 'json_object' ? { type: 'object' } : format.schema;
    const key = textOf(schema);
    let compiled = this.#formats.get(key);
    if (!compiled) compiled = { grammar: compileSchema(schema), inner: new Map() };
    // The least recently used format is the first of the map.
    this.#formats.delete(key);
    this.#formats.set(key, compiled);
    if (this.#formats.size > MAX_FORMATS) this.#formats.delete(this.#formats.keys().next().value!);
    return compiled;
  }
}

function textOf(schema: JsonSchema): string {
  try {
    return JSON.stringify(schema);
  } catch (error) {
    throw new UsageError('schema: it is nested deeper than can be read, or contains itself', { cause: error });
  }
}
