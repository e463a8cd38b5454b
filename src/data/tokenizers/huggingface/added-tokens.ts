/** Added tokens: strings that are found in a text before the model sees it, and stand for one token each. */
import { compile, escapePattern } from './step.js';

export interface AddedToken {
  readonly id: number;
  readonly content: string;
  /** Markup such as an end of text, as opposed to a word that was added to the vocabulary. */
  readonly special: boolean;
  /** Takes the white space before it. */
  readonly lstrip: boolean;
  /** Takes the white space after it. */
  readonly rstrip: boolean;
  /** Matches only where no word character is next to it. */
  readonly single_word: boolean;
  /** Searched for in the normalized text. */
  readonly normalized: boolean;
}

/** A piece of a text: one of the added tokens, or the text between them. */
export type TokenOrText = { readonly id: number } | { readonly text: string; readonly isStart: boolean };

export type AddedTokenSplitter = (text: string) => readonly TokenOrText[];

/** More tokens than this take a regular expression seconds to compile. */
const MAX_ALTERNATIVES = 2000;

/** Cuts a text at the tokens. Of tokens that match at the same place, the longest wins. */
export function createAddedTokenSplitter(tokens: readonly AddedToken[]): AddedTokenSplitter {
  if (tokens.length === 0) return (text) => [{ text, isStart: true }];
  const byContent = new Map(tokens.map((token) => [token.content, token]));
  const matches = byContent.size > MAX_ALTERNATIVES ? matchesOfMany(byContent) : matchesOf(byContent);
  return (text) => {
    const pieces: TokenOrText[] = [];
    let end = 0;
    for (const { index, 0: content } of matches(text)) {
      const token = byContent.get(content)!;
      let [from, to] = [index, index + content.length];
      if (token.single_word && (endsWithWord(text.slice(0, from)) || startsWithWord(text.slice(to)))) continue;
      if (token.lstrip) while (from > end && SPACE.test(text[from - 1])) from--;
      if (token.rstrip) to += SPACE_AT_START.exec(text.slice(to))![0].length;
      if (from > end) pieces.push({ text: text.slice(end, from), isStart: end === 0 });
      pieces.push({ id: token.id });
      end = to;
    }
    if (end < text.length) pieces.push({ text: text.slice(end), isStart: end === 0 });
    return pieces;
  };
}

type Matches = (text: string) => Iterable<{ readonly index: number; readonly 0: string }>;

function matchesOf(byContent: ReadonlyMap<string, AddedToken>): Matches {
  const longestFirst = [...byContent.keys()].sort((a, b) => b.length - a.length);
  const pattern = new RegExp(longestFirst.map(escapePattern).join('|'), 'gu');
  return (text) => text.matchAll(pattern);
}

/** Looks where a token may begin, and there for tokens of every length that begins so. */
function matchesOfMany(byContent: ReadonlyMap<string, AddedToken>): Matches {
  const lengths = new Map<string, Set<number>>();
  for (const content of byContent.keys()) {
    const first = String.fromCodePoint(content.codePointAt(0)!);
    lengths.set(first, (lengths.get(first) ?? new Set()).add(content.length));
  }
  const sorted = new Map([...lengths].map(([first, all]) => [first, [...all].sort((a, b) => b - a)]));
  const begins = new RegExp([...lengths.keys()].map(escapePattern).join('|'), 'gu');
  return function* (text) {
    let end = 0;
    for (const { 0: first, index } of text.matchAll(begins)) {
      if (index < end) continue;
      const length = sorted.get(first)?.find((one) => byContent.has(text.slice(index, index + one)));
      if (length === undefined) continue;
      end = index + length;
      yield { index, 0: text.slice(index, end) };
    }
  };
}

const SPACE = /\p{White_Space}/u;
const SPACE_AT_START = /^\p{White_Space}*/u;
const WORD_CHARACTER = compile('\\w');

function startsWithWord(text: string): boolean {
  return text !== '' && text.search(WORD_CHARACTER) === 0;
}

function endsWithWord(text: string): boolean {
  const last = [...text.slice(-2)].at(-1);
  return last !== undefined && last.search(WORD_CHARACTER) === 0;
}
