/** A case of `eval long`: a text of the user with the sentences of a task in it, as long as wanted in tokens. */
import { absorb, Purpose } from '../../data/hash.js';
import { NumberStream } from '../../data/synthetic/number-stream.js';
import type { Tokenizer } from '../../data/tokenizer.js';
import { UsageError } from '../../errors.js';
import { CANDIDATES, type Question, TASKS, type Task, writeQuestion } from './tasks.js';

export interface LongCase extends Question {
  readonly prompt: string;
  /** The needed sentences and the question alone: what a model can answer that finds everything. */
  readonly facts: string;
  /** Characters of `prompt` at which the needed sentences end. */
  readonly ends: readonly number[];
}

/** Texts to hide sentences in, cut at spaces. */
export class Haystack {
  readonly #tokenizer: Tokenizer;
  readonly #words: readonly string[];
  /** Tokens of all words before each, counted word by word: about what they have together. */
  readonly #counts: Float64Array;

  constructor(text: string, tokenizer: Tokenizer, name: string) {
    this.#tokenizer = tokenizer;
    this.#words = text.split(/(?<=\s)(?=\S)/);
    if (text.trim() === '') throw new UsageError(`${name}: contains no text`);
    this.#counts = new Float64Array(this.#words.length + 1);
    for (const [i, word] of this.#words.entries())
      this.#counts[i + 1] = this.#counts[i] + tokenizer.encode(word).length;
  }

  tokens(text: string): number {
    return this.#tokenizer.encode(text).length;
  }

  /** Case `index` of a cell: `length` tokens with the longest candidate, or up to one word less. */
  case(task: Task, length: number, depth: number, seed: number, index: number): LongCase {
    let state = absorb(absorb(0, Purpose.longEvaluation), seed);
    for (const part of [TASKS.indexOf(task), length, Math.round(1000 * depth)]) state = absorb(state, part);
    const random = new NumberStream(state, index);
    const question = writeQuestion(task, random, depth);
    const first = random.below(this.#words.length);
    const room = length - Math.max(...question.candidates.map((text) => this.tokens(` ${text}`)));
    let [least, most] = [0, this.#wordsOf(first, length)];
    if (this.tokens(assemble([], question).prompt) > room)
      throw new UsageError(
        `--lengths: ${length} tokens have no room for the task ${task}, which needs ` +
          `${length - room + this.tokens(assemble([], question).prompt)}`,
      );
    while (least < most) {
      const middle = Math.ceil((least + most) / 2);
      if (this.tokens(assemble(this.#take(first, middle), question).prompt) <= room) least = middle;
      else most = middle - 1;
    }
    const { prompt, ends } = assemble(this.#take(first, least), question);
    const needed = question.sentences.filter(({ isNeeded }) => isNeeded).map(({ text }) => text);
    return { ...question, prompt, ends, facts: `${needed.join('\n')}\n${question.question}` };
  }

  /** The end of `text` that has at most `length` tokens, but at least its last word. */
  tail(text: string, length: number): string {
    const words = text.split(/(?<=\s)(?=\S)/);
    let [least, most] = [0, words.length];
    while (least < most) {
      const middle = Math.ceil((least + most) / 2);
      if (this.tokens(words.slice(-middle).join('')) <= length) least = middle;
      else most = middle - 1;
    }
    return words.slice(-Math.max(1, least)).join('');
  }

  /** `count` words from word `first` on; the text repeats itself at its end. */
  #take(first: number, count: number): string[] {
    return Array.from({ length: count }, (_, i) => this.#words[(first + i) % this.#words.length]);
  }

  /** At least as many words as `tokens` tokens could have. */
  #wordsOf(first: number, tokens: number): number {
    const total = this.#counts[this.#words.length];
    let count = Math.floor(tokens / total) * this.#words.length;
    for (let left = 1.1 * tokens - Math.floor(tokens / total) * total; left > 0; count++) {
      const word = (first + count) % this.#words.length;
      left -= Math.max(0.5, this.#counts[word + 1] - this.#counts[word]);
    }
    return count;
  }
}

/** The words with the sentences between them, each on a line of its own, and the question at the end. */
function assemble(words: readonly string[], { sentences, question }: Question): { prompt: string; ends: number[] } {
  const placed = sentences.toSorted((a, b) => a.place - b.place);
  const ends: number[] = [];
  let prompt = '';
  let taken = 0;
  for (const { text, place, isNeeded } of placed) {
    const upTo = Math.round(place * words.length);
    prompt += `${words.slice(taken, upTo).join('').trimEnd()}\n${text}`;
    taken = Math.max(taken, upTo);
    if (isNeeded) ends.push(prompt.length);
    prompt += '\n';
  }
  return { prompt: `${prompt}${words.slice(taken).join('').trimEnd()}\n${question}`, ends };
}

/** The share that guessing reaches. */
export const CHANCE = 1 / CANDIDATES;
