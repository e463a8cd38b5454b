/**
 * How well a model recalls the facts of stories it has never seen (data/sources/stories), by the distance between a fact and the sentence
 * that needs it. An answer counts when every token of it is the most probable one after the true text before it: then greedy
 * decoding writes exactly this answer. So one forward pass over many packed stories answers all their questions.
 */

import { absorb, Purpose } from '../data/hash.js';
import { NumberStream } from '../data/synthetic/number-stream.js';
import { type Recall, type Story, writeStory } from '../data/synthetic/stories/grammar.js';
import type { Tokenizer } from '../data/tokenizer.js';
import type { Observer } from '../model/attention.js';
import type { LanguageModel } from '../model/language-model.js';
import { indexOfMax } from '../numbers.js';
import type { SparseOptions } from '../ops/attention/nsa.js';
import { Sequences } from '../ops/common/sequences.js';
import { Tape } from '../tensor/tape.js';

/** One question: the answer begins at token `at` of the story, and its fact at token `factAt`. */
export interface RecallCase {
  readonly recall: Recall;
  readonly at: number;
  readonly factAt: number;
  /** Tokens of the answer. */
  readonly length: number;
}

export interface RecallStory {
  readonly story: Story;
  readonly tokens: Int32Array;
  readonly cases: readonly RecallCase[];
}

/** Cases whose distance is in `[from, to)` tokens. */
export interface RecallRow {
  readonly from: number;
  readonly to: number;
  readonly cases: number;
  readonly correct: number;
  readonly accuracy: number;
}

/** The most probable token after each of `positions`, for every story. */
export type Predict = (stories: readonly { tokens: Int32Array; positions: readonly number[] }[]) => number[][];

/** Story `number` of an evaluation: other numbers than any training has. */
export function recallStory(tokenizer: Tokenizer, seed: number, number: number, scenes: number): RecallStory {
  const state = absorb(absorb(0, Purpose.storiesEvaluation), seed);
  const story = writeStory(new NumberStream(state, number), scenes);
  const count = (end: number) => tokenizer.encode(story.text.slice(0, end)).length;
  const cases = story.recalls.map((recall) => {
    const [at, end] = [count(recall.at), count(recall.at + recall.answer.length)];
    return { recall, at, factAt: count(recall.factAt), length: end - at };
  });
  return { story, tokens: tokenizer.encode(story.text), cases };
}

/** One question and whether the model answered it. */
export interface RecallAnswer {
  readonly story: RecallStory;
  readonly asked: RecallCase;
  /** Tokens between the fact and the answer. */
  readonly distance: number;
  readonly isCorrect: boolean;
}

export function answerRecalls(stories: readonly RecallStory[], predict: Predict): RecallAnswer[] {
  const predicted = predict(
    stories.map(({ tokens, cases }) => ({
      tokens,
      positions: cases.flatMap(({ at, length }) => Array.from({ length }, (_, i) => at + i - 1)),
    })),
  );
  return stories.flatMap((story, i) => {
    let next = 0;
    return story.cases.map((asked) => {
      const answer = predicted[i].slice(next, next + asked.length);
      next += asked.length;
      const isCorrect = answer.every((token, k) => token === story.tokens[asked.at + k]);
      return { story, asked, distance: asked.at - asked.factAt, isCorrect };
    });
  });
}

/** One row for each pair of neighbouring `distances`; answers outside them are left out. */
export function recallRows(answers: readonly RecallAnswer[], distances: readonly number[]): RecallRow[] {
  return distances.slice(1).map((to, i) => {
    const from = distances[i];
    const inside = answers.filter(({ distance }) => distance >= from && distance < to);
    const correct = inside.filter(({ isCorrect }) => isCorrect).length;
    return { from, to, cases: inside.length, correct, accuracy: correct / inside.length };
  });
}

/** Blocks that the selected branch read at one token: [layer][group][block], ascending. */
export type BlocksRead = readonly (readonly (readonly number[])[])[];

/** Finds the blocks that the model reads at token `position` of a story, and the token it predicts there. */
export function inspectRecall(
  model: LanguageModel,
  tokens: Int32Array,
  position: number,
  kernels: SparseOptions = {},
): { readonly predicted: number; readonly read: BlocksRead } {
  const read: number[][][] = [];
  const { nKvGroups: groups, nsa } = model.shape;
  const observer: Observer = {
    selected: (layer, selected) => {
      const blocks = Array.from(selected.rows(position, position + 1).read()); // [1, G, n_sel], padded with -1
      read[layer] = Array.from({ length: groups }, (_, group) =>
        blocks.slice(group * nsa.nSel, (group + 1) * nsa.nSel).filter((block) => block >= 0),
      );
    },
  };
  const [[predicted]] = predictBatch(model, [{ tokens, positions: [position] }], kernels, observer);
  return { predicted, read };
}

/** Tokens of one forward pass. */
const BATCH_TOKENS = 2 ** 13;

export function modelPredictor(model: LanguageModel, kernels: SparseOptions = {}): Predict {
  return (stories) => {
    const results: number[][] = [];
    for (let first = 0; first < stories.length; ) {
      let [last, total] = [first, 0];
      while (last < stories.length && (last === first || total + stories[last].tokens.length <= BATCH_TOKENS))
        total += stories[last++].tokens.length;
      results.push(...predictBatch(model, stories.slice(first, last), kernels));
      first = last;
    }
    return results;
  };
}

function predictBatch(
  model: LanguageModel,
  stories: Parameters<Predict>[0],
  kernels: SparseOptions,
  observer?: Observer,
): number[][] {
  const { device, shape } = model;
  const sequences = new Sequences(
    device,
    stories.map(({ tokens }) => tokens.length),
  );
  const tape = new Tape(device, { record: false });
  try {
    const packed = new Int32Array(sequences.total);
    for (const [i, { tokens }] of stories.entries()) packed.set(tokens, sequences.starts[i]);
    const rows = stories.flatMap(({ positions }, i) => positions.map((position) => sequences.starts[i] + position));
    const logits = model
      .logits(tape, tape.from(packed, [packed.length], 'i32'), rows, { lengths: sequences, kernels, observer })
      .read();
    let row = 0;
    return stories.map(({ positions }) =>
      positions.map(() => indexOfMax(logits.subarray(row * shape.vocabSize, ++row * shape.vocabSize))),
    );
  } finally {
    tape.end();
    sequences.free();
  }
}
