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
import { absorb, mix32 } from './hash.js';

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

/** Numbers that depend on two keys and on how many were drawn before. */
export class HashStream {
  readonly #first: number;
  readonly #second: number;
  #drawn = 0;

  constructor(state: number, id: number) {
    this.#first = absorb(state, id);
    this.#second = absorb(this.#first, id);
  }

  below(limit: number): number {
    return Math.floor(mix32(mix32(this.#drawn++ ^ this.#first) ^ this.#second) * (limit / 2 ** 32));
  }
}

/**
 * Fills `tokens` with one sequence of a task that `fitTask` made for this length. With a `depth` from 0 (the beginning of
 * the haystack) to 1 (its end) all questions are about one record that lies there; without, about all of them.
 */
export function writeNeedles(task: NeedleTask, random: HashStream, tokens: Int32Array, depth?: number): void {
  const { records, pairs, questions } = task;
  const { keys, values } = needleVocabulary(task.vocabSize);
  const total = records * pairs;
  const noise = tokens.length - PAIR * (total + questions);
  for (let i = 0; i < tokens.length; i++) tokens[i] = random.below(keys);
  const askedKeys = drawDistinct(random, values - keys, total).map((key) => keys + key);
  const answers = askedKeys.map(() => values + random.below(task.vocabSize - values));
  // Where in the noise each record is inserted: so they cannot overlap. The first is the one a depth is for.
  const places = Array.from({ length: records }, (_, record) => ({
    record,
    after: record === 0 && depth !== undefined ? Math.round(depth * noise) : random.below(noise + 1),
  }));
  places.sort((a, b) => a.after - b.after || a.record - b.record);
  for (const [before, { record, after }] of places.entries()) {
    const start = after + before * PAIR * pairs;
    for (let pair = 0; pair < pairs; pair++) {
      tokens[start + PAIR * pair] = askedKeys[record * pairs + pair];
      tokens[start + PAIR * pair + 1] = answers[record * pairs + pair];
    }
  }
  const asked = drawDistinct(random, depth === undefined ? total : Math.min(total, pairs), questions);
  for (const [question, pair] of asked.entries()) {
    const at = tokens.length - PAIR * (questions - question);
    tokens[at] = askedKeys[pair];
    tokens[at + 1] = answers[pair];
  }
}

/** Where the answers of a sequence of `length` tokens are, first to last; each is predicted by the token before it. */
export function answerPositions({ questions }: NeedleTask, length: number): number[] {
  return Array.from({ length: questions }, (_, question) => length - PAIR * (questions - question) + 1);
}

/** `count` different numbers below `limit`, in random order: the first of a shuffle. */
function drawDistinct(random: HashStream, limit: number, count: number): number[] {
  const order = Array.from({ length: limit }, (_, i) => i);
  for (let i = 0; i < count; i++) {
    const other = i + random.below(limit - i);
    [order[i], order[other]] = [order[other], order[i]];
  }
  return order.slice(0, count);
}
