/**
 * The mask of a text that is free at first, and has a form from some place on: from the marker of a call, or from the end of
 * the reasoning. What has begun can end in time: a token that begins it too late is not drawn.
 */
import { type AnswerForm, REASONING } from '../../data/answer-form.js';
import { AnswerParser } from '../answer-parser.js';
import type { TokenMask } from '../engine/request.js';
import { NotInGrammar, type StructuredMask } from './mask.js';
import type { Grammar } from './schema.js';

export interface FreeMaskOptions {
  /** The mask of the rest, `written` of which is there; throws `NotInGrammar`. */
  readonly begin: (grammar: Grammar, budget: number, written: string) => StructuredMask;
  /** The bytes of a token, also of special ones; a character for each byte. */
  readonly bytesOf: (token: number) => string;
  readonly endTokens: readonly number[];
  /** Most tokens of the text. */
  readonly budget: number;
  /** Where the form begins. */
  readonly start:
    | { readonly at: 'call'; readonly form: AnswerForm; readonly grammar: Grammar }
    /** The form must come, so the reasoning is ended where the tokens run out. The grammar begins with its end. */
    | { readonly at: 'end of reasoning'; readonly grammar: Grammar };
}

/** Found the beginning of the form: the bytes of its grammar that are written. */
type Written = string | null;

export class FreeMask implements TokenMask {
  readonly #options: FreeMaskOptions;
  /** For calls. */
  readonly #parser: AnswerParser;
  /** The last bytes, which may be a part of the end of the reasoning. */
  #tail = '';
  #inner: StructuredMask | null = null;
  #left: number;
  #isForced = false;
  /** Fewest tokens of the form where it must come. */
  readonly #fewest: number;

  constructor(options: FreeMaskOptions) {
    const { start, budget, begin } = options;
    this.#options = options;
    this.#left = budget;
    this.#fewest = start.at === 'call' ? 0 : begin(start.grammar, budget, '').fewestTokens;
    this.#parser = new AnswerParser(start.at === 'call' ? markerOnly(start.form) : { calls: null, reasoning: null });
  }

  /** Fewest tokens of the text. */
  get fewestTokens(): number {
    return this.#fewest;
  }

  get isConstrained(): boolean {
    return this.#inner !== null;
  }

  get isComplete(): boolean {
    return this.#inner?.isComplete ?? false;
  }

  get isCut(): boolean {
    return this.#isForced || (this.#inner?.isCut ?? false);
  }

  apply(logits: Float32Array): void {
    const { start, begin, endTokens } = this.#options;
    if (!this.#inner && start.at === 'end of reasoning') {
      for (const token of endTokens) logits[token] = Number.NEGATIVE_INFINITY;
      if (this.#left - 1 < this.#fewest) {
        this.#inner = begin(start.grammar, this.#left, '');
        this.#isForced = true;
      }
    }
    this.#inner?.apply(logits);
  }

  narrow(token: number, logits: Float32Array): boolean {
    if (this.#inner) return this.#inner.narrow(token, logits);
    if (this.#fits(token)) return false;
    for (let other = 0; other < logits.length; other++)
      if (logits[other] !== Number.NEGATIVE_INFINITY && !this.#fits(other)) logits[other] = Number.NEGATIVE_INFINITY;
    return true;
  }

  accept(token: number): void {
    if (this.#inner) {
      this.#inner.accept(token);
      return;
    }
    if (this.#options.endTokens.includes(token)) return;
    const bytes = this.#options.bytesOf(token);
    const written = this.#written(bytes);
    this.#left -= 1;
    this.#parser.push(bytes);
    this.#tail = (this.#tail + bytes).slice(1 - REASONING.close.length);
    if (written !== null) this.#inner = this.#options.begin(this.#options.start.grammar, this.#left, written);
  }

  /** Whether the text can still have its form after this token. */
  #fits(token: number): boolean {
    const { endTokens, bytesOf, start, begin } = this.#options;
    if (endTokens.includes(token)) return start.at === 'call';
    const written = this.#written(bytesOf(token));
    const left = this.#left - 1;
    if (written === null) return left >= this.#fewest;
    try {
      return begin(start.grammar, left, written).fewestTokens <= left;
    } catch (error) {
      if (error instanceof NotInGrammar) return false;
      throw error;
    }
  }

  #written(bytes: string): Written {
    const { start } = this.#options;
    if (start.at === 'call') {
      const marker = start.form.calls?.marker ?? '';
      if (!bytes.includes(marker.slice(-1))) return null; // most tokens
      const parser = this.#parser.clone();
      parser.push(bytes);
      return parser.isCalling ? parser.held : null;
    }
    const text = this.#tail + bytes;
    const at = text.indexOf(REASONING.close);
    return at < 0 ? null : text.slice(at);
  }
}

/** A form whose parser stops behind the marker, and holds what follows it. */
function markerOnly({ calls, reasoning }: AnswerForm): AnswerForm {
  return { reasoning, calls: calls && { ...calls, open: '\uFFFF' } };
}
