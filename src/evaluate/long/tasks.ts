/**
 * Questions whose answers stand in a long text by construction. A task writes sentences with their places, a question, and
 * candidates for its answer, of which one is right. Candidates are equally likely before the text is read: their number
 * says what guessing reaches.
 */
import type { NumberStream } from '../../data/synthetic/number-stream.js';

export const TASKS = ['single', 'many', 'values', 'keys', 'variables', 'counting', 'two-facts'] as const;
export type Task = (typeof TASKS)[number];

/** A sentence and its place in the text: 0 is the beginning, 1 the end. */
export interface Sentence {
  readonly text: string;
  readonly place: number;
  /** Whether the answer follows from it. */
  readonly isNeeded: boolean;
}

export interface Question {
  readonly sentences: readonly Sentence[];
  /** The text ends with it; each candidate continues it, with a space before. */
  readonly question: string;
  readonly candidates: readonly string[];
  /** Index of the right candidate. */
  readonly answer: number;
}

/** Candidates of every question. */
export const CANDIDATES = 8;

const NAMES =
  'Adam Bella Carl Dora Emil Fiona Greta Hugo Ida Jonas Karla Leo Mara Nils Olga Paul Rosa Simon Tilda Urs Vera Walter Yara Zoe'.split(
    ' ',
  );
const TOWNS =
  'Ashford Bramley Corwen Dunmore Elgin Fairlie Granton Hadley Ilford Kelso Lynton Malden Norham Oakham Penrith Redhill'.split(
    ' ',
  );
const WORDS =
  'apple bridge candle desert engine forest garden hammer island jacket kettle ladder mirror needle orange pencil rabbit saddle table umbrella velvet window yellow zebra basket copper dragon feather glove honey iron jungle'.split(
    ' ',
  );

/** `depth` from 0 to 1 is the place of the sentence that the question is about. */
export function writeQuestion(task: Task, random: NumberStream, depth: number): Question {
  const anywhere = () => random.below(1001) / 1000;
  const names = draw(random, NAMES, 16);
  const words = draw(random, WORDS, WORDS.length);
  const own = words.slice(0, CANDIDATES);
  const needed = (text: string, place: number): Sentence => ({ text, place, isNeeded: true });
  const other = (text: string): Sentence => ({ text, place: anywhere(), isNeeded: false });
  const code = (name: string, word: string) => `The code word of ${name} is ${word}.`;
  const codes = own.slice(1).map((word, i) => other(code(names[i + 1], word)));
  switch (task) {
    case 'single':
      return shuffled(random, [needed(code(names[0], own[0]), depth)], `The code word of ${names[0]} is`, own);
    case 'many': {
      const sentences = [needed(code(names[0], own[0]), depth), ...codes];
      return shuffled(random, sentences, `The code word of ${names[0]} is`, own);
    }
    case 'keys': {
      const sentences = [
        needed(code(names[0], own[0]), depth),
        ...codes.map((sentence, i) => ({ ...sentence, isNeeded: i < 2 })),
      ];
      const question = `The code words of ${names[0]}, ${names[1]} and ${names[2]} are`;
      return shuffled(random, sentences, question, lists(own.slice(0, 3), own.slice(3)));
    }
    case 'values': {
      const given = (name: string, word: string) => `${name} was given the word ${word}.`;
      const places = [depth, anywhere(), anywhere()].sort((a, b) => a - b);
      const sentences = [
        ...places.map((place, i) => needed(given(names[0], own[i]), place)),
        ...own.slice(3).map((word, i) => other(given(names[i + 1], word))),
      ];
      const question = `The words given to ${names[0]}, in their order, are`;
      return shuffled(random, sentences, question, lists(own.slice(0, 3), own.slice(3)));
    }
    case 'variables': {
      // Eight chains of two links; the question is about the end of one, and the text has all eight values.
      const sentences = own.flatMap((word, i) => {
        const [first, second] = [names[2 * i], names[2 * i + 1]];
        const [is, follows] = [`${first} carries the ${word}.`, `${second} carries the same as ${first}.`];
        return i === 0 ? [needed(is, anywhere()), needed(follows, depth)] : [other(is), other(follows)];
      });
      return shuffled(random, sentences, `So ${names[1]} carries the`, own);
    }
    case 'counting': {
      const around = () => Math.min(1, Math.max(0, depth + (random.below(201) - 100) / 1000));
      const sentences = own.flatMap((word, i) =>
        Array.from({ length: i === 0 ? 6 : 2 }, () =>
          i === 0 ? needed(`Noted: ${word}.`, around()) : other(`Noted: ${word}.`),
        ),
      );
      return shuffled(random, sentences, 'The word that was noted most often is', own);
    }
    case 'two-facts': {
      const towns = draw(random, TOWNS, CANDIDATES);
      const sentences = towns.flatMap((town, i) => {
        const [lives, word] = [`${names[i]} lives in ${town}.`, `The code word of ${town} is ${own[i]}.`];
        return i === 0 ? [needed(lives, depth), needed(word, (depth + 0.5) % 1)] : [other(lives), other(word)];
      });
      return shuffled(random, sentences, `The code word of the town where ${names[0]} lives is`, own);
    }
  }
}

/** The right list, and lists in which one element is another or two have changed places. */
function lists([a, b, c]: readonly string[], others: readonly string[]): string[] {
  const all = [
    [a, b, c],
    [b, a, c],
    [a, c, b],
    [c, b, a],
    [others[0], b, c],
    [others[1], b, c],
    [a, others[2], c],
    [a, b, others[3]],
  ];
  return all.map(([first, second, third]) => `${first}, ${second} and ${third}`);
}

/** `candidates[0]` is right; the order hides it, so that equal scores are a guess. */
function shuffled(
  random: NumberStream,
  sentences: readonly Sentence[],
  question: string,
  candidates: readonly string[],
): Question {
  const order = draw(random, candidates, candidates.length);
  return { sentences, question, candidates: order, answer: order.indexOf(candidates[0]) };
}

/** `count` different elements in random order. */
function draw<T>(random: NumberStream, from: readonly T[], count: number): T[] {
  const rest = [...from];
  return Array.from({ length: count }, () => rest.splice(random.below(rest.length), 1)[0]);
}
