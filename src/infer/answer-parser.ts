/**
 * Takes the text of an answer apart as it is written: reasoning, content, calls of tools. The parts do not depend on how the
 * text was cut into pieces.
 */
import { type AnswerForm, ID_LENGTH, REASONING, type WithIds } from '../data/answer-form.js';

/** A part of an answer. The arguments of a call come in pieces; together they are one JSON object. */
export type AnswerPart =
  | { readonly type: 'reasoning'; readonly text: string }
  | { readonly type: 'content'; readonly text: string }
  | { readonly type: 'call'; readonly name: string }
  | { readonly type: 'arguments'; readonly text: string };

/** A call of a tool, as a model wrote it. */
export interface ToolCall {
  readonly name: string;
  /** A JSON object. */
  readonly arguments: string;
}

/** An answer that has ended. */
export interface ParsedAnswer {
  readonly reasoning: string;
  readonly content: string;
  readonly calls: readonly ToolCall[];
}

type Place = 'start' | 'reasoning' | 'content' | 'open' | 'name' | 'middle' | 'arguments' | 'after';

export class AnswerParser {
  readonly #form: AnswerForm;
  #place: Place;
  /** Text that is not sent yet: it may be a part of a marker, or space at an end. */
  #held = '';
  /** Whether text of the present part was sent: space before it is left out. */
  #hasText = false;
  #hasReasoned = false;
  #depth = 0;
  #isString = false;
  #isEscape = false;

  constructor(form: AnswerForm) {
    this.#form = form;
    this.#place = form.reasoning === 'open' ? 'reasoning' : form.reasoning === 'possible' ? 'start' : 'content';
  }

  /** Whether a call has begun: from there on the form of the text is fixed. */
  get isCalling(): boolean {
    return !['start', 'reasoning', 'content'].includes(this.#place);
  }

  /** Whether the reasoning has ended, or there is none. */
  get isAnswering(): boolean {
    return this.#place !== 'reasoning' && this.#place !== 'start';
  }

  /** Text that was not taken apart yet: in a call, all since the last part. */
  get held(): string {
    return this.#held;
  }

  clone(): AnswerParser {
    const copy = new AnswerParser(this.#form);
    copy.#place = this.#place;
    copy.#held = this.#held;
    copy.#hasText = this.#hasText;
    copy.#hasReasoned = this.#hasReasoned;
    copy.#depth = this.#depth;
    copy.#isString = this.#isString;
    copy.#isEscape = this.#isEscape;
    return copy;
  }

  push(text: string): AnswerPart[] {
    this.#held += text;
    const parts: AnswerPart[] = [];
    while (this.#step(parts));
    return parts;
  }

  /** The text has ended. */
  end(): AnswerPart[] {
    const text = this.#held;
    this.#held = '';
    if (text === '' || this.isCalling) return [];
    if (this.#place === 'reasoning') {
      const length = endOf(text, text.length);
      return length === 0 ? [] : [{ type: 'reasoning', text: text.slice(0, length) }];
    }
    return [{ type: 'content', text }];
  }

  /** Takes the next part of the held text; whether there was one. */
  #step(parts: AnswerPart[]): boolean {
    switch (this.#place) {
      case 'start':
        return this.#begin();
      case 'reasoning':
        return this.#reason(parts);
      case 'content':
        return this.#write(parts);
      case 'open':
        return this.#literal([this.#form.calls?.open ?? ''], 'name');
      case 'name': {
        const at = this.#held.indexOf(this.#form.calls?.middle[0] ?? '');
        if (at < 0) return false;
        parts.push({ type: 'call', name: this.#held.slice(0, at) });
        this.#held = this.#held.slice(at);
        return this.#go('middle');
      }
      case 'middle':
        return this.#literal(this.#form.calls?.middle ?? [], 'arguments');
      case 'arguments':
        return this.#arguments(parts);
      case 'after':
        return this.#literal(this.#form.calls?.between ?? ['\uFFFF'], 'name');
    }
  }

  #go(place: Place): true {
    this.#place = place;
    this.#hasText = false;
    return true;
  }

  #begin(): boolean {
    const text = withoutStart(this.#held);
    if (text.startsWith(REASONING.open)) {
      this.#held = text.slice(REASONING.open.length);
      return this.#go('reasoning');
    }
    return REASONING.open.startsWith(text) ? false : this.#go('content');
  }

  #reason(parts: AnswerPart[]): boolean {
    if (!this.#hasText) this.#held = withoutStart(this.#held);
    const at = this.#held.indexOf(REASONING.close);
    if (at < 0) {
      this.#send(parts, 'reasoning', REASONING.close);
      return false;
    }
    this.#emit(parts, 'reasoning', endOf(this.#held, at));
    this.#held = this.#held.slice(this.#held.indexOf(REASONING.close) + REASONING.close.length);
    this.#hasReasoned = true;
    return this.#go('content');
  }

  #write(parts: AnswerPart[]): boolean {
    const { calls } = this.#form;
    if (this.#hasReasoned && !this.#hasText) this.#held = withoutStart(this.#held);
    if (!calls) {
      this.#emit(parts, 'content', this.#held.length);
      return false;
    }
    if (calls.isFirst) {
      const text = withoutStart(this.#held);
      if (!this.#hasText && text.startsWith(calls.marker)) {
        this.#held = text.slice(calls.marker.length);
        return this.#go('open');
      }
      if (this.#hasText || !calls.marker.startsWith(text)) this.#emit(parts, 'content', this.#held.length);
      return false;
    }
    const at = this.#held.indexOf(calls.marker);
    if (at < 0) {
      this.#send(parts, 'content', calls.marker);
      return false;
    }
    this.#emit(parts, 'content', endOf(this.#held, at));
    this.#held = this.#held.slice(this.#held.indexOf(calls.marker) + calls.marker.length);
    return this.#go('open');
  }

  /** Sends what can be neither the beginning of `marker` nor the space before it. */
  #send(parts: AnswerPart[], type: 'reasoning' | 'content', marker: string): void {
    this.#emit(parts, type, endOf(this.#held, heldBack(this.#held, marker)));
  }

  #emit(parts: AnswerPart[], type: 'reasoning' | 'content', length: number): void {
    if (length === 0) return;
    parts.push({ type, text: this.#held.slice(0, length) });
    this.#held = this.#held.slice(length);
    this.#hasText = true;
  }

  /** Takes a text that is known, with ids, and goes on at `next`. */
  #literal(parts: WithIds, next: Place): boolean {
    const length = parts.reduce((sum, part) => sum + part.length, (parts.length - 1) * ID_LENGTH);
    if (this.#held.length < length || !this.#held.startsWith(parts[0])) return false;
    this.#held = this.#held.slice(length);
    return this.#go(next);
  }

  #arguments(parts: AnswerPart[]): boolean {
    for (let i = 0; i < this.#held.length; i++) {
      const character = this.#held[i];
      if (this.#isString) {
        if (this.#isEscape) this.#isEscape = false;
        else if (character === '\\') this.#isEscape = true;
        else if (character === '"') this.#isString = false;
        continue;
      }
      if (character === '"') this.#isString = true;
      else if (character === '{' || character === '[') this.#depth += 1;
      else if ((character === '}' || character === ']') && --this.#depth === 0) {
        parts.push({ type: 'arguments', text: this.#held.slice(0, i + 1) });
        this.#held = this.#held.slice(i + 1);
        return this.#go('after');
      }
    }
    if (this.#held !== '') parts.push({ type: 'arguments', text: this.#held });
    this.#held = '';
    return false;
  }
}

const isSpace = (character: string) => character === ' ' || (character >= '\t' && character <= '\r');

/** Spaces of ASCII only: the same for text and for its bytes. */
function withoutStart(text: string): string {
  let at = 0;
  while (at < text.length && isSpace(text[at])) at += 1;
  return text.slice(at);
}

/** Where the text before `at` ends but for space. */
function endOf(text: string, at: number): number {
  let end = at;
  while (end > 0 && isSpace(text[end - 1])) end -= 1;
  return end;
}

/** Where a text ends before what may become `marker`. */
function heldBack(text: string, marker: string): number {
  for (let length = Math.min(marker.length - 1, text.length); length > 0; length--)
    if (text.endsWith(marker.slice(0, length))) return text.length - length;
  return text.length;
}

/** The parts of a whole answer. */
export function parseAnswer(form: AnswerForm, text: string): ParsedAnswer {
  const parser = new AnswerParser(form);
  return joinParts([...parser.push(text), ...parser.end()]);
}

export function joinParts(parts: readonly AnswerPart[]): ParsedAnswer {
  let [reasoning, content] = ['', ''];
  const calls: { name: string; arguments: string }[] = [];
  for (const part of parts)
    if (part.type === 'reasoning') reasoning += part.text;
    else if (part.type === 'content') content += part.text;
    else if (part.type === 'call') calls.push({ name: part.name, arguments: '' });
    else calls[calls.length - 1].arguments += part.text;
  return { reasoning, content, calls };
}
