/**
 * JSON numbers of up to 15 digits before and 15 after the decimal point, so that every one of them is finite and whole ones
 * are exact. Without bounds an exponent of up to two digits may follow. With bounds every prefix can be continued to a
 * number within them: bounds and prefixes are compared as integers, in units of 1e-15.
 */
import type { Machine, MachineState } from './grammar.js';

export interface NumberOptions {
  readonly isInteger: boolean;
  /** Inclusive. */
  readonly minimum?: number;
  readonly maximum?: number;
}

const DIGITS = 15;
const UNIT = 10n ** BigInt(DIGITS);
const MOST = UNIT * UNIT - 1n;
const PREFIX = /^-?(?:(?:0|[1-9]\d{0,14})(?:\.(?:\d{0,15}|\d{1,15}[eE](?:[+-]?\d{0,2}))|[eE](?:[+-]?\d{0,2}))?)?$/;
const COMPLETE = /^-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?$/;
const CHARACTERS = '+-.0123456789Ee';

/** State: the text so far; without bounds with a 1 for every digit whose value does not matter. */
export class NumberMachine implements Machine {
  readonly start = '';
  readonly #isInteger: boolean;
  readonly #bounds: { readonly low: bigint; readonly high: bigint } | null;
  readonly #closes = new Map<string, string | null>();

  constructor({ isInteger, minimum, maximum }: NumberOptions) {
    this.#isInteger = isInteger;
    this.#bounds =
      minimum === undefined && maximum === undefined
        ? null
        : {
            low: minimum === undefined ? -MOST : units(minimum, 'up'),
            high: maximum === undefined ? MOST : units(maximum, 'down'),
          };
  }

  /** Whether there is a number within the bounds. */
  get isPossible(): boolean {
    return this.#close('') !== null;
  }

  step(state: MachineState, byte: number): string | null {
    const character = String.fromCharCode(byte);
    if (!CHARACTERS.includes(character)) return null;
    const text = state + character;
    if (!PREFIX.test(text)) return null;
    if (/[.eE]/.test(text) && (this.#isInteger || (this.#bounds && /[eE]/.test(text)))) return null;
    if (this.#bounds) return this.#close(text) === null ? null : text;
    return text.replace(/\d/g, (digit, at) => (digit === '0' && (at === 0 || text[at - 1] === '-') ? '0' : '1'));
  }

  isEnd(state: MachineState): boolean {
    return COMPLETE.test(state as string) && this.#close(state as string) === '';
  }

  close(state: MachineState): string {
    const text = this.#close(state as string);
    if (text === null) throw new Error(`no number within the bounds begins with ${state}`);
    return text;
  }

  sharedKey(): null {
    return null;
  }

  #close(text: string): string | null {
    if (!this.#bounds) return COMPLETE.test(text) ? '' : '0';
    let close = this.#closes.get(text);
    if (close === undefined) {
      close = this.#search(text);
      this.#closes.set(text, close);
    }
    return close;
  }

  #search(text: string): string | null {
    const { low, high } = this.#bounds!;
    const [, sign, whole, point, fraction] = /^(-?)(\d*)(\.?)(\d*)$/.exec(text)!;
    if (whole === '') return this.#searchFirst(text);
    const [least, most] = sign === '' ? [low, high] : [-high, -low];
    const options: string[] = [];
    const mostWhole = point !== '' || whole === '0' ? 0 : DIGITS - whole.length;
    const mostFraction = this.#isInteger ? 0 : DIGITS - fraction.length;
    const leastFraction = point !== '' && fraction === '' ? 1 : 0;
    // More digits before the point (`before`), and after it (`after`), the fewest characters first.
    for (let length = 0; length <= mostWhole + mostFraction + 1 && options.length === 0; length++)
      for (let before = 0; before <= Math.min(length, mostWhole); before++) {
        const rest = length - before;
        const needsPoint = point === '' && rest > 0;
        const after = needsPoint ? rest - 1 : rest;
        if ((needsPoint && after === 0) || after < leastFraction || after > mostFraction) continue;
        const found = smallest(whole, fraction, before, after, least, most);
        if (found !== null) options.push(found.slice(whole.length + point.length + fraction.length));
      }
    return options.sort()[0] ?? null;
  }

  #searchFirst(sign: string): string | null {
    const firsts = sign === '' ? '-0123456789' : '0123456789';
    let best: string | null = null;
    for (const first of firsts) {
      const rest = this.#close(sign + first);
      if (rest !== null && (best === null || rest.length + 1 < best.length)) best = first + rest;
    }
    return best;
  }
}

/** The smallest number from `least` to `most` that continues `whole.fraction` with these numbers of digits, as text. */
function smallest(
  whole: string,
  fraction: string,
  before: number,
  after: number,
  least: bigint,
  most: bigint,
): string | null {
  const places = fraction.length + after;
  const grid = 10n ** BigInt(DIGITS - places);
  const start = BigInt(whole + '0'.repeat(before)) * UNIT + BigInt(fraction.padEnd(DIGITS, '0') || '0');
  const width = before > 0 || fraction === '' ? 10n ** BigInt(before) * UNIT : 10n ** BigInt(DIGITS - fraction.length);
  const from = start > least ? start : least;
  const value = ((from + grid - 1n) / grid) * grid;
  if (value > most || value >= start + width) return null;
  const digits = (value / UNIT).toString();
  return places === 0 ? digits : `${digits}.${(value % UNIT).toString().padStart(DIGITS, '0').slice(0, places)}`;
}

/** A bound in units, rounded towards the allowed side, and no larger than the longest number. */
function units(bound: number, towards: 'up' | 'down'): bigint {
  if (Math.abs(bound) >= 1e15)
    return bound > 0 ? (towards === 'up' ? MOST + 1n : MOST) : towards === 'up' ? -MOST : -MOST - 1n;
  const [mantissa, exponent = '0'] = Math.abs(bound).toString().split('e');
  const [whole, fraction = ''] = mantissa.split('.');
  const shift = DIGITS + Number(exponent) - fraction.length;
  const digits = BigInt(whole + fraction);
  const isUp = bound < 0 === (towards === 'down'); // away from zero
  const magnitude =
    shift >= 0
      ? digits * 10n ** BigInt(shift)
      : (digits + (isUp ? 10n ** BigInt(-shift) - 1n : 0n)) / 10n ** BigInt(-shift);
  return bound < 0 ? -magnitude : magnitude;
}
