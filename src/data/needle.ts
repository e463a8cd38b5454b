/**
 * A task that only retrieval solves: records of key-value pairs lie somewhere in a haystack of noise, and at the end some
 * of the keys are asked for.
 *
 *   noise … k₁v₁ k₂v₂ … noise … k₉v₉ … noise … | k₂ v₂ k₉ v₉ …
 *
 * Half of the vocabulary is noise, a quarter keys, a quarter values. A record holds several pairs, so that a summary of its
 * block says that the key is there, but not which of the values belongs to it: the block itself has to be read.
 */
import { UsageError } from '../errors.js';
import { absorb } from './hash.js';

/** What is hidden in one sequence and asked for at its end. */
export interface NeedleTask {
  readonly vocabSize: number;
  readonly records: number;
  /** Pairs of a record. */
  readonly pairs: number;
  readonly questions: number;
}

/** Records take at most this share of a sequence: a short one holds fewer. */
const RECORD_SHARE = 1 / 4;

/** Tokens of a pair, and of a question with its answer. */
const PAIR = 2;

/** First token of each kind; the noise begins at 0. */
export function needleVocabulary(vocabSize: number): { keys: number; values: number } {
  return { keys: Math.floor(vocabSize / 2), values: Math.floor((3 * vocabSize) / 4) };
}

/** The task as it fits into sequences of `length` tokens. */
export function fitTask(task: NeedleTask, length: number): NeedleTask {
  const { keys, values } = needleVocabulary(task.vocabSize);
  const held = Math.min(
    Math.floor((length * RECORD_SHARE) / (PAIR * task.pairs)),
    Math.floor((values - keys) / task.pairs),
  );
  if (held < 1) {
    const room = values - keys < task.pairs ? `has ${values - keys} keys` : `of ${length} tokens is too short`;
    const subject = values - keys < task.pairs ? `a vocabulary of ${task.vocabSize}` : 'a sequence';
    throw new UsageError(`data.needle_pairs: ${subject} ${room} for a record of ${task.pairs} pairs`);
  }
  const records = Math.min(task.records, held);
  return { ...task, records, questions: Math.min(task.questions, records * task.pairs) };
}

/** Numbers that depend on a seed and a number (of a sequence) alone. Small and fast (sfc32): haystacks are long. */
export class NumberStream {
  #a: number;
  #b: number;
  #c: number;
  #counter = 1;

  constructor(seedHash: number, id: number) {
    this.#a = absorb(seedHash, id);
    this.#b = absorb(this.#a, id);
    this.#c = absorb(this.#b, id);
    for (let round = 0; round < 4; round++) this.#next();
  }

  /** A whole number from 0 to limit - 1. */
  below(limit: number): number {
    return Math.floor(this.#next() * (limit / 2 ** 32));
  }

  #next(): number {
    const result = (this.#a + this.#b + this.#counter) | 0;
    this.#counter = (this.#counter + 1) | 0;
    this.#a = this.#b ^ (this.#b >>> 9);
    this.#b = (this.#c + (this.#c << 3)) | 0;
    this.#c = (((this.#c << 21) | (this.#c >>> 11)) + result) | 0;
    return result >>> 0;
  }
}

/** Writes sequences of a task that `fitTask` made for their length. */
export class NeedleWriter {
  readonly #task: NeedleTask;
  /** 0, 1, 2 … whenever nothing is being drawn. */
  readonly #order: Int32Array;
  readonly #keys: Int32Array;
  readonly #values: Int32Array;
  readonly #asked: Int32Array;

  constructor(task: NeedleTask) {
    const { keys, values } = needleVocabulary(task.vocabSize);
    this.#task = task;
    this.#order = Int32Array.from({ length: Math.max(values - keys, task.records * task.pairs) }, (_, i) => i);
    this.#keys = new Int32Array(task.records * task.pairs);
    this.#values = new Int32Array(task.records * task.pairs);
    this.#asked = new Int32Array(task.questions);
  }

  /**
   * Fills `tokens` with a sequence. With a `depth` from 0 (the beginning of the haystack) to 1 (its end) all questions are
   * about one record that lies there; without, about all of them.
   */
  write(random: NumberStream, tokens: Int32Array, depth?: number): void {
    const { vocabSize, records, pairs, questions } = this.#task;
    const first = needleVocabulary(vocabSize);
    const [keys, values, asked] = [this.#keys, this.#values, this.#asked];
    for (let i = 0; i < tokens.length; i++) tokens[i] = random.below(first.keys);
    this.#drawDistinct(random, first.values - first.keys, keys);
    for (let i = 0; i < values.length; i++) values[i] = random.below(vocabSize - first.values);
    const put = (at: number, pair: number): void => {
      tokens[at] = first.keys + keys[pair];
      tokens[at + 1] = first.values + values[pair];
    };
    // Where in the noise each record is inserted: so they cannot overlap. The first is the one a depth is for.
    const noise = tokens.length - PAIR * (keys.length + questions);
    const places = Array.from({ length: records }, (_, record) => ({
      record,
      after: record === 0 && depth !== undefined ? Math.round(depth * noise) : random.below(noise + 1),
    }));
    places.sort((a, b) => a.after - b.after || a.record - b.record);
    for (let before = 0; before < records; before++) {
      const { record, after } = places[before];
      const start = after + before * PAIR * pairs;
      for (let pair = 0; pair < pairs; pair++) put(start + PAIR * pair, record * pairs + pair);
    }
    this.#drawDistinct(random, depth === undefined ? keys.length : pairs, asked);
    const end = tokens.length - PAIR * questions;
    for (let question = 0; question < questions; question++) put(end + PAIR * question, asked[question]);
  }

  /** Fills `into` with different numbers below `limit`, in random order: the first of a shuffle, which is then undone. */
  #drawDistinct(random: NumberStream, limit: number, into: Int32Array): void {
    const order = this.#order;
    for (let i = 0; i < into.length; i++) {
      const other = i + random.below(limit - i);
      into[i] = order[other];
      order[other] = order[i];
      order[i] = into[i];
    }
    // What moved: the first places, and those whose number was drawn.
    for (let i = 0; i < into.length; i++) {
      order[i] = i;
      order[into[i]] = into[i];
    }
  }
}

/** Where the answers of a sequence of `length` tokens are, first to last; each is predicted by the token before it. */
export function answerPositions({ questions }: NeedleTask, length: number): number[] {
  return Array.from({ length: questions }, (_, question) => length - PAIR * (questions - question) + 1);
}
