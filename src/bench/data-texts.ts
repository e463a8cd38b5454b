/** Synthetic texts to tokenise: web-like, documentation, and a worst case. */
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { packageRoot } from '../config/shipped.js';

export type TextKind = 'web' | 'markdown' | 'worst';

/** A reproducible generator of numbers in [0, 1). */
function numbers(seed: number): () => number {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

/** Documents of about `bytes` bytes together. */
export function makeTexts(kind: TextKind, bytes: number): string[] {
  if (kind === 'web') return webTexts(bytes);
  if (kind === 'markdown') return markdownTexts(bytes);
  return worstTexts(bytes);
}

/**
 * Sentences of words whose frequencies fall as in natural language: the frequent ones from our own documents, a long tail
 * of invented ones, some numbers and links. The tail keeps a cache of words as busy as a real corpus does.
 */
function webTexts(bytes: number): string[] {
  const random = numbers(1);
  const known = [
    ...new Set(
      documentation()
        .join(' ')
        .toLowerCase()
        .match(/[a-z]{2,14}/g) ?? [],
    ),
  ];
  const syllables = [
    'an',
    'ter',
    'com',
    'pre',
    'ing',
    'tion',
    'al',
    'ver',
    'ment',
    'ist',
    'ous',
    'gra',
    'lo',
    'mi',
    'sub',
    'ex',
  ];
  const invent = () =>
    Array.from({ length: 2 + Math.floor(3 * random()) }, () => syllables[Math.floor(random() * syllables.length)]).join(
      '',
    );
  const words = [...known, ...Array.from({ length: 40_000 }, invent)];
  // Zipf's law: the rank of a word is exponential in a uniform number.
  const word = () => words[Math.floor(words.length ** random()) - 1];
  const sentence = () => {
    const picked = Array.from({ length: 6 + Math.floor(18 * random()) }, word);
    if (random() < 0.1) picked.push(String(Math.floor(3000 * random())));
    if (random() < 0.02) picked.push(`https://www.${word()}.org/${word()}`);
    const text = picked.join(random() < 0.15 ? ', ' : ' ');
    return `${text[0].toUpperCase()}${text.slice(1)}.`;
  };
  return fill(bytes, () =>
    Array.from({ length: 5 + Math.floor(60 * random()) }, sentence).join(random() < 0.2 ? '\n\n' : ' '),
  );
}

function markdownTexts(bytes: number): string[] {
  const pages = documentation();
  let page = 0;
  return fill(bytes, () => pages[page++ % pages.length]);
}

/** Random letters without spaces: no word repeats, so the tokenizer's cache never helps. */
function worstTexts(bytes: number): string[] {
  const random = numbers(3);
  const run = (length: number) =>
    Array.from({ length }, () =>
      random() < 0.2
        ? String.fromCodePoint(0x4e00 + Math.floor(20_000 * random()))
        : String.fromCharCode(97 + Math.floor(26 * random())),
    ).join('');
  return fill(bytes, () => Array.from({ length: 12 }, () => run(50 + Math.floor(400 * random()))).join(' '));
}

function fill(bytes: number, make: () => string): string[] {
  const texts: string[] = [];
  for (let size = 0; size < bytes; ) {
    const text = make();
    texts.push(text);
    size += Buffer.byteLength(text);
  }
  return texts;
}

function documentation(): string[] {
  const folder = join(packageRoot, 'docs');
  return readdirSync(folder, { recursive: true, encoding: 'utf8' })
    .filter((name) => name.endsWith('.md'))
    .sort()
    .map((name) => readFileSync(join(folder, name), 'utf8'));
}
