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
export type Piece = { readonly id: number } | { readonly text: string; readonly isStart: boolean };

export type AddedTokenSplitter = (text: string) => readonly Piece[];

/** Cuts a text at the tokens. Of tokens that match at the same place, the longest wins. */
export function createAddedTokenSplitter(tokens: readonly AddedToken[]): AddedTokenSplitter {
  if (tokens.length === 0) return (text) => [{ text, isStart: true }];
  const byContent = new Map(tokens.map((token) => [token.content, token]));
  const longestFirst = [...byContent.keys()].sort((a, b) => b.length - a.length);
  const pattern = new RegExp(longestFirst.map(escapePattern).join('|'), 'gu');
  return (text) => {
    const pieces: Piece[] = [];
    let end = 0;
    for (const match of text.matchAll(pattern)) {
      const token = byContent.get(match[0])!;
      let [from, to] = [match.index, match.index + match[0].length];
      if (token.single_word && (endsWithWord(text.slice(0, from)) || startsWithWord(text.slice(to)))) continue;
      if (token.lstrip) from = Math.max(end, from - SPACE_AT_END.exec(text.slice(0, from))![0].length);
      if (token.rstrip) to += SPACE_AT_START.exec(text.slice(to))![0].length;
      if (from > end) pieces.push({ text: text.slice(end, from), isStart: end === 0 });
      pieces.push({ id: token.id });
      end = to;
    }
    if (end < text.length) pieces.push({ text: text.slice(end), isStart: end === 0 });
    return pieces;
  };
}

const SPACE_AT_START = /^\p{White_Space}*/u;
const SPACE_AT_END = /\p{White_Space}*$/u;
const WORD_CHARACTER = compile('\\w');

function startsWithWord(text: string): boolean {
  return text !== '' && text.search(WORD_CHARACTER) === 0;
}

function endsWithWord(text: string): boolean {
  const last = [...text.slice(-2)].at(-1);
  return last !== undefined && last.search(WORD_CHARACTER) === 0;
}
