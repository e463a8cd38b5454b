/**
 * Retrieval by depth and length: a record of facts is placed at a given depth of a haystack, and the model is asked for one
 * of its values (data/synthetic/needle.ts). The answer is one token after the end of the context, so the argmax of the last
 * logits is the greedy answer, and one forward pass over packed cases evaluates them all.
 */

import { absorb, Purpose } from '../data/hash.js';
import { askedFactPosition, fitTask, type NeedleTask, NeedleWriter } from '../data/synthetic/needle.js';
import { NumberStream } from '../data/synthetic/number-stream.js';
import type { Observer } from '../model/attention.js';
import type { LanguageModel } from '../model/language-model.js';
import { indexOfMax } from '../numbers.js';
import type { SparseOptions } from '../ops/attention/nsa.js';
import { Sequences } from '../ops/common/sequences.js';
import { Tape } from '../tensor/tape.js';

export interface NeedleGrid {
  /** Tokens of a case, its answer included. */
  readonly lengths: readonly number[];
  /** Positions of the needle, in percent of the haystack. */
  readonly depths: readonly number[];
  /** Cases for each length and depth. */
  readonly trials: number;
  readonly records: number;
  readonly facts: number;
  readonly seed: number;
}

export interface NeedleCell {
  readonly length: number;
  readonly depth: number;
  readonly trials: number;
  readonly correct: number;
  readonly accuracy: number;
  /**
   * How often the last token selected the block that holds the answer: distinguishes a wrong answer from a needle that was
   * not read. Null for dense attention.
   */
  readonly recall: NeedleRecall | null;
}

export interface NeedleRecall {
  /** Share of the cases in which some group of some layer selected the block. */
  readonly any: number;
  /** Share of all (case, group), for each layer; 0 for a layer with only a window, which selects nothing. */
  readonly layers: readonly number[];
}

interface Case {
  readonly cell: { correct: number; readonly seen: Seen };
  readonly tokens: Int32Array;
}

/** Cases that selected the needle's block, and for each layer the (case, group) that did. */
interface Seen {
  cases: number;
  readonly layers: number[];
}

/** Maximum tokens of one forward pass; a longer case is a pass of its own. */
const BATCH_TOKENS = { cpu: 2 ** 14, cuda: 2 ** 18 };

/** One cell for each length and depth, lengths first. */
export function evaluateNeedle(
  model: LanguageModel,
  grid: NeedleGrid,
  {
    kernels = {},
    onProgress = () => {},
  }: { kernels?: SparseOptions; onProgress?: (done: number, all: number) => void },
): NeedleCell[] {
  const all = grid.lengths.length * grid.depths.length * grid.trials;
  let done = 0;
  return grid.lengths.flatMap((length) => {
    const task = taskOf(model, grid, length);
    const cells = grid.depths.map((depth) => ({
      length,
      depth,
      trials: grid.trials,
      correct: 0,
      seen: { cases: 0, layers: new Array<number>(model.shape.nLayers).fill(0) },
    }));
    const batch = Math.max(1, Math.floor(BATCH_TOKENS[model.device.kind] / length));
    const cases = cells.length * grid.trials;
    for (let first = 0; first < cases; first += batch) {
      const some = Array.from({ length: Math.min(batch, cases - first) }, (_, i): Case => {
        const cell = cells[Math.floor((first + i) / grid.trials)];
        return { cell, tokens: caseTokens(task, length, cell.depth, grid.seed, first + i) };
      });
      answer(model, some, kernels);
      done += some.length;
      onProgress(done, all);
    }
    return cells.map(({ seen, ...cell }) => ({
      ...cell,
      accuracy: cell.correct / cell.trials,
      recall: model.shape.attention === 'nsa' ? recallOf(seen, cell.trials, model.shape.nKvGroups) : null,
    }));
  });
}

function recallOf({ cases, layers }: Seen, trials: number, groups: number): NeedleRecall {
  return { any: cases / trials, layers: layers.map((count) => count / (trials * groups)) };
}

/** The task for this length. Throws if the length or the vocabulary is too small. */
function taskOf({ shape }: LanguageModel, { records, facts }: NeedleGrid, length: number): NeedleTask {
  return fitTask({ vocabSize: shape.vocabSize, records, facts, questions: 1, absent: 0 }, length);
}

/** Tokens of case `index` of a length. Their hashes differ from those of all training data. */
export function caseTokens(task: NeedleTask, length: number, depth: number, seed: number, index: number): Int32Array {
  const tokens = new Int32Array(length);
  const state = absorb(absorb(absorb(0, Purpose.needleEvaluation), seed), length);
  new NeedleWriter(task).write(new NumberStream(state, index), tokens, depth / 100);
  return tokens;
}

/** Counts the cases whose answer is the argmax of the last logits, and those that selected its block. */
function answer(model: LanguageModel, cases: readonly Case[], kernels: SparseOptions): void {
  const { device, shape } = model;
  const contexts = cases.map(({ tokens }) => tokens.subarray(0, -1));
  const sequences = new Sequences(
    device,
    contexts.map((context) => context.length),
  );
  const tape = new Tape(device, { record: false });
  try {
    const packed = new Int32Array(sequences.total);
    for (const [i, context] of contexts.entries()) packed.set(context, sequences.starts[i]);
    const last = contexts.map((context, i) => sequences.starts[i] + context.length - 1);
    const blocks = cases.map(({ tokens }) => Math.floor(askedFactPosition(shape.vocabSize, tokens) / shape.nsa.lSel));
    const hasSeen = new Array<boolean>(cases.length).fill(false);
    const observer: Observer = {
      selected: (layer, selected) => {
        for (const [i, { cell }] of cases.entries()) {
          const chosen = selected.rows(last[i], last[i] + 1).read(); // [1, G, n_sel], a block at most once in a group
          const groups = Array.from(chosen).filter((block) => block === blocks[i]).length;
          cell.seen.layers[layer] += groups;
          hasSeen[i] ||= groups > 0;
        }
      },
    };
    const ids = tape.from(packed, [packed.length], 'i32');
    const logits = model.logits(tape, ids, last, { lengths: sequences, kernels, observer }).read();
    for (const [i, { cell, tokens }] of cases.entries()) {
      if (hasSeen[i]) cell.seen.cases++;
      const row = logits.subarray(i * shape.vocabSize, (i + 1) * shape.vocabSize);
      if (indexOfMax(row) === tokens[tokens.length - 1]) cell.correct++;
    }
  } finally {
    tape.end();
    sequences.free();
  }
}
