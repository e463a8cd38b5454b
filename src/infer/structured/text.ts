/** The inside of a JSON string: UTF-8 without control characters, escapes, a number of code points, excluded texts. */
import { utf8 } from '../../bytes.js';
import type { Machine, MachineState } from './grammar.js';

/** Where inside a character the text is. */
const CHARACTER = {
  start: 0,
  escape: 1,
  hex4: 2,
  hex3: 3,
  hex3AfterD: 4,
  hex2: 5,
  hex1: 6,
  more1: 7,
  more2: 8,
  more3: 9,
  afterE0: 10,
  afterEd: 11,
  afterF0: 12,
  afterF4: 13,
} as const;
const CHARACTER_STATES = 16;

/** The shortest end of a character, the first in byte order. */
const CHARACTER_CLOSE: readonly string[] = [
  ...['', '"', '0000', '000', '000', '00', '0'],
  ...['\x80', '\x80\x80', '\x80\x80\x80', '\xa0\x80', '\x80\x80', '\x90\x80\x80', '\x80\x80\x80'],
];

/** Next state inside a character, by state and byte; -1 where the byte is not allowed. Row 0 begins a character. */
const NEXT = characterTable();

function characterTable(): Int8Array {
  const table = new Int8Array(CHARACTER_STATES * 256).fill(-1);
  const set = (state: number, low: number, high: number, to: number) =>
    table.fill(to, state * 256 + low, state * 256 + high + 1);
  const c = CHARACTER;
  set(c.start, 0x20, 0x7f, c.start);
  set(c.start, 0x22, 0x22, -1);
  set(c.start, 0x5c, 0x5c, c.escape);
  set(c.start, 0xc2, 0xdf, c.more1);
  set(c.start, 0xe0, 0xe0, c.afterE0);
  set(c.start, 0xe1, 0xef, c.more2);
  set(c.start, 0xed, 0xed, c.afterEd);
  set(c.start, 0xf0, 0xf0, c.afterF0);
  set(c.start, 0xf1, 0xf3, c.more3);
  set(c.start, 0xf4, 0xf4, c.afterF4);
  for (const letter of '"\\/bfnrt') set(c.escape, letter.charCodeAt(0), letter.charCodeAt(0), c.start);
  set(c.escape, 0x75, 0x75, c.hex4);
  const hex = (from: number, to: number, digits = '0123456789abcdefABCDEF') => {
    for (const digit of digits) set(from, digit.charCodeAt(0), digit.charCodeAt(0), to);
  };
  // Half of a surrogate pair is not a character: after \ud a digit of 0 to 7 follows.
  hex(c.hex4, c.hex3);
  hex(c.hex4, c.hex3AfterD, 'dD');
  hex(c.hex3, c.hex2);
  hex(c.hex3AfterD, c.hex2, '01234567');
  hex(c.hex2, c.hex1);
  hex(c.hex1, c.start);
  set(c.more1, 0x80, 0xbf, c.start);
  set(c.more2, 0x80, 0xbf, c.more1);
  set(c.more3, 0x80, 0xbf, c.more2);
  set(c.afterE0, 0xa0, 0xbf, c.more1);
  set(c.afterEd, 0x80, 0x9f, c.more1);
  set(c.afterF0, 0x90, 0xbf, c.more2);
  set(c.afterF4, 0x80, 0x8f, c.more2);
  return table;
}

/** Excluded texts as a tree by bytes. */
class ExcludedTexts {
  readonly #children: Map<number, number>[] = [new Map()];
  readonly #isText: boolean[] = [false];

  constructor(texts: readonly string[]) {
    for (const text of texts) {
      let at = 0;
      for (const byte of utf8(text)) {
        let to = this.#children[at].get(byte);
        if (to === undefined) {
          to = this.#children.length;
          this.#children.push(new Map());
          this.#isText.push(false);
          this.#children[at].set(byte, to);
        }
        at = to;
      }
      this.#isText[at] = true;
    }
  }

  /** The place after a byte; -1 once no excluded text begins like this. */
  step(place: number, byte: number): number {
    return place < 0 ? -1 : (this.#children[place].get(byte) ?? -1);
  }

  has(place: number): boolean {
    return place >= 0 && this.#isText[place];
  }

  get size(): number {
    return this.#children.length;
  }
}

export interface TextOptions {
  /** Code points. */
  readonly minLength?: number;
  readonly maxLength?: number;
  /** Texts that this one must not be. */
  readonly excluded?: readonly string[];
}

/** State: ((code points * places + place + 1) * 16) + state inside a character; code points only as far as they matter. */
export class TextMachine implements Machine {
  readonly start: number;
  readonly #min: number;
  readonly #max: number;
  readonly #excluded: ExcludedTexts | null;
  readonly #places: number;
  readonly #closes = new Map<number, string>();

  constructor({ minLength = 0, maxLength = Number.POSITIVE_INFINITY, excluded = [] }: TextOptions = {}) {
    this.#min = minLength;
    this.#max = maxLength;
    this.#excluded = excluded.length > 0 ? new ExcludedTexts(excluded) : null;
    this.#places = (this.#excluded?.size ?? 0) + 1;
    this.start = this.#state(0, this.#excluded ? 0 : -1, CHARACTER.start);
  }

  step(state: MachineState, byte: number): number | null {
    const { count, place, character } = this.#parts(state as number);
    const to = NEXT[character * 256 + byte];
    if (to < 0) return null;
    if (character !== CHARACTER.start) return this.#state(count, this.#excluded?.step(place, byte) ?? -1, to);
    if (count === this.#max) return null;
    // An escape could spell an excluded text in another way.
    if (place >= 0 && to === CHARACTER.escape) return null;
    const counted = this.#max === Number.POSITIVE_INFINITY ? Math.min(count + 1, this.#min) : count + 1;
    return this.#state(counted, this.#excluded?.step(place, byte) ?? -1, to);
  }

  isEnd(state: MachineState): boolean {
    const { count, place, character } = this.#parts(state as number);
    return character === CHARACTER.start && count >= this.#min && !this.#excluded?.has(place);
  }

  close(state: MachineState): string {
    const { count, place, character } = this.#parts(state as number);
    if (place >= 0) return this.#closeExcluded(state as number);
    return CHARACTER_CLOSE[character] + ' '.repeat(Math.max(0, this.#min - count));
  }

  sharedKey(state: MachineState, longest: number): string | null {
    const { count, place, character } = this.#parts(state as number);
    if (place >= 0) return null;
    return `${character}:${Math.min(longest, Math.max(0, this.#min - count))}:${Math.min(longest, this.#max - count)}`;
  }

  /** Near an excluded text: the first end that a search by length and byte order finds. */
  #closeExcluded(start: number): string {
    const known = this.#closes.get(start);
    if (known !== undefined) return known;
    const queue: [string, number][] = [['', start]];
    for (const [text, state] of queue) {
      if (this.isEnd(state)) {
        this.#closes.set(start, text);
        return text;
      }
      for (let byte = 0x20; byte < 256; byte++) {
        const next = this.step(state, byte);
        if (next !== null) queue.push([text + String.fromCharCode(byte), next]);
      }
    }
    throw new Error('a text that is not excluded exists within a few characters');
  }

  #state(count: number, place: number, character: number): number {
    return (count * this.#places + place + 1) * CHARACTER_STATES + character;
  }

  #parts(state: number): { count: number; place: number; character: number } {
    const character = state % CHARACTER_STATES;
    const rest = (state - character) / CHARACTER_STATES;
    return { character, place: (rest % this.#places) - 1, count: Math.floor(rest / this.#places) };
  }
}
