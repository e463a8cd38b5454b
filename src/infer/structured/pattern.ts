/**
 * Regular expressions of `pattern`: literals, classes, groups, alternatives, quantifiers, and the anchors ^ and $ around a
 * whole alternative. The expression describes the text; the nodes read the text as it stands in a JSON string.
 */
import { utf8 } from '../../bytes.js';
import { UsageError } from '../../errors.js';
import type { GrammarBuilder, Node } from './grammar.js';

/** Code points, inclusive. */
type Range = readonly [low: number, high: number];
type Term =
  | { readonly kind: 'set'; readonly ranges: readonly Range[] }
  | { readonly kind: 'group'; readonly options: readonly Sequence[] }
  | { readonly kind: 'anchor'; readonly anchor: '^' | '$' };
type Sequence = readonly { readonly term: Term; readonly least: number; readonly most: number }[];

const LAST = 0x10ffff;
/** Groups within each other. */
const MAX_DEPTH = 100;
/** Characters of a pattern that are repeated in a message. */
const MAX_SHOWN = 100;
const DIGIT: readonly Range[] = [[0x30, 0x39]];
const WORD: readonly Range[] = [[0x30, 0x39], [0x41, 0x5a], [0x5f, 0x5f], [0x61, 0x7a]]; // biome-ignore format: one class per line
const SPACE: readonly Range[] = [[9, 13], [32, 32], [0xa0, 0xa0], [0x1680, 0x1680], [0x2000, 0x200a], [0x2028, 0x2029], [0x202f, 0x202f], [0x205f, 0x205f], [0x3000, 0x3000], [0xfeff, 0xfeff]]; // biome-ignore format: one class per line
const NO_LINE_END = complement([[10, 10], [13, 13], [0x2028, 0x2029]]); // biome-ignore format: one class per line
const ANY = complement([]);
const CONTROL: Readonly<Record<string, number>> = { n: 10, r: 13, t: 9, f: 12, v: 11, 0: 0 };

/** Adds nodes for a string that matches `pattern`, after its opening quote; returns the node before the closing one. */
export function addPattern(builder: GrammarBuilder, from: Node, pattern: string): Node {
  const options = new PatternParser(pattern).parse();
  const end = builder.node({ isText: true });
  const adder = new PatternNodes(builder);
  for (const option of options) {
    const isAnchor = (at: number, anchor: string) => {
      const term = option.at(at)?.term;
      return term?.kind === 'anchor' && term.anchor === anchor;
    };
    const [startsAnywhere, endsAnywhere] = [!isAnchor(0, '^'), !isAnchor(-1, '$')];
    const inner = option.slice(startsAnywhere ? 0 : 1, endsAnywhere ? undefined : -1);
    const any = { term: { kind: 'set', ranges: ANY }, least: 0, most: Number.POSITIVE_INFINITY } as const;
    const whole = [...(startsAnywhere ? [any] : []), ...inner, ...(endsAnywhere ? [any] : [])];
    adder.sequence(from, whole).empty.push(end);
  }
  return end;
}

class PatternParser {
  readonly #pattern: string;
  readonly #characters: readonly string[];
  #at = 0;
  #depth = 0;

  constructor(pattern: string) {
    this.#pattern = pattern;
    this.#characters = [...pattern];
  }

  parse(): readonly Sequence[] {
    const options = this.#options();
    if (this.#at < this.#characters.length) throw this.#unsupported('an unmatched )');
    return options;
  }

  #unsupported(what: string): UsageError {
    return new UsageError(`pattern ${JSON.stringify(this.#pattern.slice(0, MAX_SHOWN))}: ${what} is not supported`);
  }

  #peek(): string | undefined {
    return this.#characters[this.#at];
  }

  #take(expected?: string): string {
    const character = this.#characters[this.#at];
    if (character === undefined) throw this.#unsupported('its unfinished end');
    if (expected !== undefined && character !== expected) throw this.#unsupported(`"${character}" here`);
    this.#at += 1;
    return character;
  }

  #options(): Sequence[] {
    const options = [this.#sequence()];
    while (this.#peek() === '|') {
      this.#take();
      options.push(this.#sequence());
    }
    return options;
  }

  #sequence(): Sequence {
    const sequence: { term: Term; least: number; most: number }[] = [];
    for (let next = this.#peek(); next !== undefined && next !== '|' && next !== ')'; next = this.#peek()) {
      const term = this.#term();
      sequence.push({ term, ...(term.kind === 'anchor' ? { least: 1, most: 1 } : this.#quantifier()) });
    }
    return sequence;
  }

  #term(): Term {
    const character = this.#take();
    if (character === '^' || character === '$') return { kind: 'anchor', anchor: character };
    if (character === '.') return { kind: 'set', ranges: NO_LINE_END };
    if (character === '[') return { kind: 'set', ranges: this.#class() };
    if (character === '\\') return { kind: 'set', ranges: this.#escape() };
    if (character === '(') return this.#group();
    if ('*+?{}]'.includes(character)) throw this.#unsupported(`"${character}" here`);
    return { kind: 'set', ranges: one(character.codePointAt(0)!) };
  }

  #group(): Term {
    if (this.#peek() === '?') {
      this.#take();
      if (this.#peek() !== ':') throw this.#unsupported(`the group (?${this.#peek() ?? ''}`);
      this.#take();
    }
    this.#depth += 1;
    if (this.#depth > MAX_DEPTH) throw this.#unsupported(`a group within ${MAX_DEPTH} others`);
    const options = this.#options();
    this.#take(')');
    this.#depth -= 1;
    return { kind: 'group', options };
  }

  #quantifier(): { least: number; most: number } {
    const bounds = this.#bounds();
    if (bounds === null) return { least: 1, most: 1 };
    if (this.#peek() === '?') this.#take(); // a lazy quantifier matches the same texts
    if (bounds.most < bounds.least) throw this.#unsupported('a quantifier with its bounds in the wrong order');
    return bounds;
  }

  #bounds(): { least: number; most: number } | null {
    const next = this.#peek();
    const simple = { '*': [0, Number.POSITIVE_INFINITY], '+': [1, Number.POSITIVE_INFINITY], '?': [0, 1] }[next ?? ''];
    if (simple) {
      this.#take();
      return { least: simple[0], most: simple[1] };
    }
    if (next !== '{') return null;
    const match = /^\{(\d+)(,?)(\d*)\}/.exec(this.#characters.slice(this.#at, this.#at + 24).join(''));
    if (!match) throw this.#unsupported('"{" here');
    this.#at += match[0].length;
    const least = Number(match[1]);
    return { least, most: match[2] === '' ? least : match[3] === '' ? Number.POSITIVE_INFINITY : Number(match[3]) };
  }

  #class(): readonly Range[] {
    const isNegated = this.#peek() === '^';
    if (isNegated) this.#take();
    const ranges: Range[] = [];
    while (this.#peek() !== ']') {
      const low = this.#classAtom();
      if (this.#peek() !== '-' || this.#characters[this.#at + 1] === ']') {
        ranges.push(...low);
        continue;
      }
      this.#take('-');
      const high = this.#classAtom();
      const [from, to] = [low[0][0], high[0][0]];
      if (!isOne(low) || !isOne(high) || to < from)
        throw this.#unsupported('a range of a class that is not two characters');
      ranges.push([from, to]);
    }
    this.#take(']');
    return complement(isNegated ? ranges : complement(ranges)); // also sorted, without overlaps
  }

  #classAtom(): readonly Range[] {
    const character = this.#take();
    if (character !== '\\') return one(character.codePointAt(0)!);
    if (this.#peek() !== 'b') return this.#escape();
    this.#take();
    return one(8);
  }

  #escape(): readonly Range[] {
    const character = this.#take();
    const classes: Record<string, readonly Range[]> = { d: DIGIT, w: WORD, s: SPACE };
    const known = classes[character.toLowerCase()];
    if (known) return character === character.toLowerCase() ? known : complement(known);
    if (character in CONTROL) return one(CONTROL[character]);
    if (character === 'x' || character === 'u') {
      const digits = this.#characters.slice(this.#at, this.#at + (character === 'x' ? 2 : 4)).join('');
      if (!/^([0-9a-fA-F]{2}){1,2}$/.test(digits)) throw this.#unsupported(`\\${character}`);
      this.#at += digits.length;
      return one(Number.parseInt(digits, 16));
    }
    if (/[\w]/.test(character)) throw this.#unsupported(`\\${character}`);
    return one(character.codePointAt(0)!);
  }
}

function one(codePoint: number): readonly Range[] {
  return [[codePoint, codePoint]];
}

function isOne(ranges: readonly Range[]): boolean {
  return ranges.length === 1 && ranges[0][0] === ranges[0][1];
}

function complement(ranges: readonly Range[]): readonly Range[] {
  const result: Range[] = [];
  let next = 0;
  for (const [low, high] of [...ranges].sort((a, b) => a[0] - b[0])) {
    if (low > next) result.push([next, low - 1]);
    next = Math.max(next, high + 1);
  }
  if (next <= LAST) result.push([next, LAST]);
  return result;
}

/** Turns a parsed pattern into nodes. */
class PatternNodes {
  readonly #builder: GrammarBuilder;

  constructor(builder: GrammarBuilder) {
    this.#builder = builder;
  }

  sequence(from: Node, sequence: Sequence): Node {
    let at = from;
    for (const { term, least, most } of sequence) {
      for (let i = 0; i < least; i++) at = this.#term(at, term);
      if (most === Number.POSITIVE_INFINITY) {
        const loop = this.#node();
        at.empty.push(loop);
        this.#term(loop, term).empty.push(loop);
        at = this.#node();
        loop.empty.push(at);
      } else if (most > least) {
        const end = this.#node();
        for (let i = least; i < most; i++) {
          at.empty.push(end);
          at = this.#term(at, term);
        }
        at.empty.push(end);
        at = end;
      }
    }
    return at;
  }

  #node(): Node {
    return this.#builder.node({ isText: true });
  }

  #term(from: Node, term: Term): Node {
    if (term.kind === 'anchor')
      throw new UsageError(`pattern: the anchor ${term.anchor} is supported only at the ends of the pattern`);
    const to = this.#node();
    if (term.kind === 'set') this.#set(from, to, term.ranges);
    else for (const option of term.options) this.sequence(from, option).empty.push(to);
    return to;
  }

  /** The characters of a set as they are written in a JSON string. */
  #set(from: Node, to: Node, ranges: readonly Range[]): void {
    for (const [low, high] of ranges) {
      for (let code = low; code <= Math.min(high, 0x5c); code++)
        if (code < 0x20 || code === 0x22 || code === 0x5c)
          this.#builder.literal(from, JSON.stringify(String.fromCharCode(code)).slice(1, -1), true).empty.push(to);
      // Between characters that need an escape; UTF-8 has no surrogates.
      for (const [first, last] of [[0x20, 0x21], [0x23, 0x5b], [0x5d, 0xd7ff], [0xe000, LAST]]) // biome-ignore format: one list
        if (Math.max(low, first) <= Math.min(high, last))
          this.#utf8(from, to, Math.max(low, first), Math.min(high, last));
    }
  }

  /** Code points of a range by their bytes, split until every byte has a range of its own. */
  #utf8(from: Node, to: Node, low: number, high: number): void {
    for (const limit of [0x7f, 0x7ff, 0xffff])
      if (low <= limit && high > limit) {
        this.#utf8(from, to, low, limit);
        this.#utf8(from, to, limit + 1, high);
        return;
      }
    const [first, last] = [utf8(String.fromCodePoint(low)), utf8(String.fromCodePoint(high))];
    // All but the last `rest` bytes are equal, or the last bytes of both ends are the outermost ones.
    for (let rest = 1; rest < first.length; rest++) {
      const mask = 2 ** (6 * rest) - 1;
      if ((low & ~mask) === (high & ~mask)) continue;
      if ((low & mask) !== 0) {
        this.#utf8(from, to, low, low | mask);
        this.#utf8(from, to, (low | mask) + 1, high);
        return;
      }
      if ((high & mask) !== mask) {
        this.#utf8(from, to, low, (high & ~mask) - 1);
        this.#utf8(from, to, high & ~mask, high);
        return;
      }
    }
    let at = from;
    for (let i = 0; i < first.length; i++) {
      const next = i === first.length - 1 ? to : this.#node();
      at.edges.push({ low: first[i], high: last[i], to: next });
      at = next;
    }
  }
}
