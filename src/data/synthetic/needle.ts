/**
 * A task that only retrieval solves: records of facts lie at random places in noise, and questions at the end ask for some
 * of them.
 *
 *   noise … f₁ f₂ f₃ … noise … f₉ … noise … | k₂ v₂ k₉ v₉ …
 *
 * A fact is one token for a pair of key and value. A question is the key, the answer is the value. A record holds several
 * facts, so a summary of its block can show that the key is present, but not which value belongs to it: the block itself
 * must be read.
 *
 * Questions may also ask for keys that are absent; their answer is the token NOTHING. Without them a model can learn to
 * answer with one fixed value whenever it finds no other, and never looks that value up.
 */
import { UsageError } from '../../errors.js';
import type { NumberStream } from './number-stream.js';

/** Sizes of the task in one sequence. */
export interface NeedleTask {
  readonly vocabSize: number;
  readonly records: number;
  /** Facts of a record. */
  readonly facts: number;
  readonly questions: number;
  /** Number of the questions that ask for absent keys. */
  readonly absent: number;
}

/** Records take at most this share of a sequence, so short sequences hold fewer. */
const RECORD_SHARE = 1 / 4;

/** Tokens of a question with its answer. */
const QUESTION = 2;

/** The answer to a question about an absent key. Noise tokens follow it. */
export const NOTHING = 0;

/** Number of keys (and of values), and the first token of each kind. Noise begins at 1. */
export interface NeedleVocabulary {
  readonly count: number;
  readonly keys: number;
  readonly values: number;
  readonly facts: number;
}

/** Facts take at most half of the vocabulary, at its end. Keys and values precede them; the rest is noise. */
export function needleVocabulary(vocabSize: number): NeedleVocabulary {
  const count = Math.floor(Math.sqrt(vocabSize / 2));
  const facts = vocabSize - count * count;
  return { count, facts, values: facts - count, keys: facts - 2 * count };
}

/** The task reduced to what fits into sequences of `length` tokens. */
export function fitTask(task: NeedleTask, length: number): NeedleTask {
  const { count, keys } = needleVocabulary(task.vocabSize);
  if (count < task.facts || keys < NOTHING + 2)
    throw new UsageError(
      `data.needle_facts: a vocabulary of ${task.vocabSize} has ${count} keys, too few for a record of ${task.facts} facts`,
    );
  const held = Math.floor((length * RECORD_SHARE) / task.facts);
  if (held < 1)
    throw new UsageError(
      `data.needle_facts: a sequence of ${length} tokens is too short for a record of ${task.facts} facts`,
    );
  // Limited by the vocabulary first, then by the length of this sequence.
  const most = Math.min(task.records, Math.floor((count - task.absent) / task.facts));
  if (most < 1)
    throw new UsageError(
      `data.needle_absent: a vocabulary of ${task.vocabSize} has ${count} keys, too few for a record of ${task.facts} facts and ${task.absent} that are absent`,
    );
  const records = Math.min(most, held);
  // Questions shrink with the records. The share of absent keys stays, and at least one question has an answer.
  const asked = Math.min(task.questions, most * task.facts + task.absent);
  const answered = Math.max(1, asked - task.absent);
  const room = Math.floor((length - records * task.facts) / QUESTION);
  const questions = Math.min(asked, Math.floor((records * task.facts * asked) / answered), room);
  return { ...task, records, questions, absent: Math.floor(((asked - answered) * questions) / asked) };
}

/** Writes sequences of a task that `fitTask` made for their length. */
export class NeedleWriter {
  readonly #task: NeedleTask;
  /** The identity permutation between draws. */
  readonly #order: Int32Array;
  readonly #keys: Int32Array;
  readonly #values: Int32Array;
  readonly #asked: Int32Array;

  constructor(task: NeedleTask) {
    this.#task = task;
    this.#order = Int32Array.from({ length: needleVocabulary(task.vocabSize).count }, (_, i) => i);
    this.#keys = new Int32Array(task.records * task.facts + task.absent);
    this.#values = new Int32Array(task.records * task.facts);
    this.#asked = new Int32Array(task.questions);
  }

  /**
   * Fills `tokens` with a sequence. With a `depth` from 0 (beginning of the noise) to 1 (its end) all questions ask for one
   * record at that depth; without it they ask for all records.
   */
  write(random: NumberStream, tokens: Int32Array, depth?: number): void {
    const { vocabSize, records, facts, questions, absent } = this.#task;
    const vocabulary = needleVocabulary(vocabSize);
    const [keys, values, asked] = [this.#keys, this.#values, this.#asked];
    const noises = vocabulary.keys - NOTHING - 1;
    for (let i = 0; i < tokens.length; i++) tokens[i] = NOTHING + 1 + random.below(noises);
    this.#drawDistinct(random, vocabulary.count, keys);
    for (let i = 0; i < values.length; i++) values[i] = random.below(vocabulary.count);
    // Positions in the noise before which records are inserted, so they cannot overlap. `depth` places record 0.
    const noise = tokens.length - values.length - QUESTION * questions;
    const places = Array.from({ length: records }, (_, record) => ({
      record,
      after: record === 0 && depth !== undefined ? Math.round(depth * noise) : random.below(noise + 1),
    }));
    places.sort((a, b) => a.after - b.after || a.record - b.record);
    for (let before = 0; before < records; before++) {
      const { record, after } = places[before];
      for (let fact = record * facts; fact < (record + 1) * facts; fact++)
        tokens[after + before * facts + (fact % facts)] =
          vocabulary.facts + keys[fact] * vocabulary.count + values[fact];
    }
    this.#drawDistinct(random, depth === undefined ? values.length : facts, asked.subarray(absent));
    for (let i = 0; i < absent; i++) asked[i] = values.length + i;
    if (absent > 0) shuffle(random, asked);
    for (let question = 0; question < questions; question++) {
      const at = tokens.length - QUESTION * (questions - question);
      tokens[at] = vocabulary.keys + keys[asked[question]];
      tokens[at + 1] = asked[question] < values.length ? vocabulary.values + values[asked[question]] : NOTHING;
    }
  }

  /** Fills `into` with distinct random numbers below `limit`: a partial Fisher-Yates shuffle, which is then undone. */
  #drawDistinct(random: NumberStream, limit: number, into: Int32Array): void {
    const order = this.#order;
    for (let i = 0; i < into.length; i++) {
      const other = i + random.below(limit - i);
      into[i] = order[other];
      order[other] = order[i];
      order[i] = into[i];
    }
    // Restores the entries that the shuffle moved.
    for (let i = 0; i < into.length; i++) {
      order[i] = i;
      order[into[i]] = into[i];
    }
  }
}

function shuffle(random: NumberStream, numbers: Int32Array): void {
  for (let last = numbers.length - 1; last > 0; last--) {
    const other = random.below(last + 1);
    [numbers[last], numbers[other]] = [numbers[other], numbers[last]];
  }
}

/** Positions of the answers in a sequence of `length` tokens. The token before each predicts it. */
export function answerPositions({ questions }: NeedleTask, length: number): number[] {
  return Array.from({ length: questions }, (_, question) => length - QUESTION * (questions - question) + 1);
}

/** Position of the fact that the last question asks for. */
export function askedFactPosition(vocabSize: number, tokens: Int32Array): number {
  const { count, keys, facts } = needleVocabulary(vocabSize);
  const first = facts + (tokens[tokens.length - QUESTION] - keys) * count;
  return tokens.findIndex((token) => token >= first && token < first + count);
}
