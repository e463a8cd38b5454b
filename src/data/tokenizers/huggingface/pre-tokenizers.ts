/** Pre-tokenizers: cut a normalized text into words, which the model encodes one by one. */
import { compile, escapePattern, patternOf, type Step, stepsOf, textOf } from './step.js';

/** `isStart`: the text is the beginning of the whole input, which some steps treat differently. */
export type PreTokenizer = (text: string, isStart: boolean) => readonly string[];

export interface WordSplitter {
  readonly split: PreTokenizer;
  /** Whether the model must write each word as byte characters first (see `byteCharacters`). */
  readonly isByteLevel: boolean;
}

/** The word pattern of the ByteLevel step. */
const BYTE_LEVEL_WORDS = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

export function createWordSplitter(step: Step | null | undefined): WordSplitter {
  if (!step) return { split: whole, isByteLevel: false };
  const steps = flatten(step);
  const last = steps.at(-1);
  // Nearly always the last step maps words to byte characters. The model does it instead, after a look at its cache of words.
  const isByteLevel = last?.type === 'ByteLevel';
  const cuts = (isByteLevel ? steps.slice(0, -1) : steps).map(createPreTokenizer);
  if (isByteLevel) cuts.push(...byteLevelCuts(last));
  return { split: inSequence(cuts), isByteLevel };
}

const whole: PreTokenizer = (text) => [text];

function flatten(step: Step): readonly Step[] {
  return step.type === 'Sequence' ? stepsOf(step, 'pretokenizers').flatMap(flatten) : [step];
}

function inSequence(steps: readonly PreTokenizer[]): PreTokenizer {
  if (steps.length === 0) return whole;
  if (steps.length === 1) return steps[0];
  return (text, isStart) => {
    let words: readonly string[] = [text];
    for (const split of steps) words = words.flatMap((word, i) => split(word, isStart && i === 0));
    return words;
  };
}

function createPreTokenizer(step: Step): PreTokenizer {
  switch (step.type) {
    case 'ByteLevel':
      return inSequence([...byteLevelCuts(step), (text) => [byteCharacters(text)]]);
    case 'Split':
      return splitter(patternOf(step), textOf(step, 'behavior'), step['invert'] === true);
    case 'Digits':
      return splitter(/\p{N}/gu, step['individual_digits'] === true ? 'Isolated' : 'Contiguous');
    case 'Punctuation':
      return splitter(PUNCTUATION, textOf(step, 'behavior', 'Isolated'));
    case 'Whitespace':
      return splitter(compile('\\w+|[^\\w\\s]+'), 'Removed', true);
    case 'WhitespaceSplit':
      return splitter(WHITESPACE, 'Removed');
    case 'CharDelimiterSplit':
      return splitter(new RegExp(escapePattern(textOf(step, 'delimiter')), 'gu'), 'Removed');
    case 'BertPreTokenizer':
      return inSequence([splitter(WHITESPACE, 'Removed'), splitter(PUNCTUATION, 'Isolated')]);
    case 'Metaspace':
      return metaspace(step);
    default:
      throw new Error(`the pre-tokenizer "${step.type}" is not supported`);
  }
}

const WHITESPACE = /\p{White_Space}/gu;
/** Unicode punctuation and the ASCII symbols. */
const PUNCTUATION = /[\p{P}!-/:-@[-`{-~]/gu;

/** The cuts of a ByteLevel step, without its mapping to byte characters. */
function byteLevelCuts(step: Step): PreTokenizer[] {
  const cuts: PreTokenizer[] = [];
  if (step['add_prefix_space'] === true) cuts.push((text) => [text.startsWith(' ') ? text : ` ${text}`]);
  if (step['use_regex'] !== false) cuts.push(splitter(compile(BYTE_LEVEL_WORDS), 'Isolated'));
  return cuts;
}

/** Spaces become ▁, with one before the text, and words begin at ▁. */
function metaspace(step: Step): PreTokenizer {
  const replacement = textOf(step, 'replacement', '▁');
  // Older files have `add_prefix_space` instead of a scheme.
  const scheme = textOf(step, 'prepend_scheme', step['add_prefix_space'] === false ? 'never' : 'always');
  if (!['always', 'first', 'never'].includes(scheme))
    throw new Error(`the prepend_scheme "${scheme}" of Metaspace is not supported`);
  const cut =
    step['split'] === false ? whole : splitter(new RegExp(escapePattern(replacement), 'gu'), 'MergedWithNext');
  return (text, isStart) => {
    const marked = text.replaceAll(' ', () => replacement);
    const isPrepended = scheme === 'always' || (scheme === 'first' && isStart);
    return cut(isPrepended && !marked.startsWith(replacement) ? replacement + marked : marked, isStart);
  };
}

/** Cuts at the matches of a pattern. `invert`: what lies between the matches counts as the match. */
function splitter(pattern: RegExp, behavior: string, invert = false): PreTokenizer {
  switch (behavior) {
    case 'Isolated':
      return (text) => isolated(text, pattern);
    case 'Removed':
      return (text) => parts(text, pattern).flatMap(({ word, isMatch }) => (isMatch === invert ? [word] : []));
    case 'Contiguous':
      return (text) => joined(parts(text, pattern), (before, part) => before.isMatch === part.isMatch);
    case 'MergedWithPrevious':
      return (text) =>
        joined(parts(text, pattern), (before, part) => part.isMatch !== invert && before.isMatch === invert);
    case 'MergedWithNext':
      return (text) =>
        joined(parts(text, pattern), (before, part) => before.isMatch !== invert && part.isMatch === invert);
    default:
      throw new Error(`the behavior "${behavior}" of a Split is not supported`);
  }
}

interface SplitPart {
  readonly word: string;
  readonly isMatch: boolean;
}

/** Matches and what lies between them, as words. */
function isolated(text: string, pattern: RegExp): readonly string[] {
  // The word patterns of language models match every character: then the matches are all there is, and no match objects
  // are needed.
  const matches: readonly string[] = text.match(pattern) ?? [];
  let length = 0;
  for (const match of matches) length += match.length;
  if (length === text.length && !matches.includes('')) return matches;
  return parts(text, pattern).map(({ word }) => word);
}

function parts(text: string, pattern: RegExp): SplitPart[] {
  const result: SplitPart[] = [];
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    if (match[0] === '') continue;
    if (match.index > end) result.push({ word: text.slice(end, match.index), isMatch: false });
    result.push({ word: match[0], isMatch: true });
    end = match.index + match[0].length;
  }
  if (end < text.length) result.push({ word: text.slice(end), isMatch: false });
  return result;
}

/** Joins a part to the one before it where `joins` says so. */
function joined(all: readonly SplitPart[], joins: (before: SplitPart, part: SplitPart) => boolean): readonly string[] {
  const words: string[] = [];
  all.forEach((part, i) => {
    if (i > 0 && joins(all[i - 1], part)) words[words.length - 1] += part.word;
    else words.push(part.word);
  });
  return words;
}

/** The printable character for each byte in byte-level vocabularies: itself, or one from U+0100 on. */
export const BYTE_CHARACTERS: readonly string[] = (() => {
  const isPrintable = (byte: number) =>
    (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || (byte >= 174 && byte <= 255);
  let extra = 0;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(isPrintable(byte) ? byte : 256 + extra++));
})();

/** The UTF-8 bytes of a text, each as its printable character. A lone surrogate becomes U+FFFD. */
export function byteCharacters(text: string): string {
  let result = '';
  for (const byte of Buffer.from(text, 'utf8')) result += BYTE_CHARACTERS[byte];
  return result;
}
