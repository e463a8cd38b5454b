/** `eval long`: questions over long texts by task, length and depth, between an oracle and a model with only a window. */
import { indexOfMax } from '../../numbers.js';
import { CHANCE, type Haystack } from './cases.js';
import type { Task } from './tasks.js';

/** Something that reads prompts. */
export interface Reader {
  /**
   * Log-probabilities of candidates after a prompt. `seen`: whether the last token of the prompt selected the blocks of all
   * these characters; null where that is unknown or nothing is selected.
   */
  score(prompt: string, candidates: readonly string[], characters: readonly number[]): Promise<Scores>;
  /** The greedy continuation of a prompt, to the end of its line. */
  generate(prompt: string): Promise<string>;
}

export interface Scores {
  readonly logprobs: readonly number[];
  readonly seen: boolean | null;
}

export interface LongGrid {
  readonly tasks: readonly Task[];
  /** Tokens of a case. */
  readonly lengths: readonly number[];
  /** In percent of the text. */
  readonly depths: readonly number[];
  /** Cases of a cell. */
  readonly trials: number;
  readonly seed: number;
  /** Tokens that a model with only a window sees. */
  readonly window: number;
  /** Whether answers are also generated. */
  readonly generate: boolean;
}

/** A cell of the grid; shares of its cases. */
export interface LongCell {
  readonly task: Task;
  readonly length: number;
  readonly depth: number;
  readonly trials: number;
  readonly correct: number;
  /** The right candidate is the most probable one. */
  readonly found: number;
  /** The same when only the needed sentences stand before the question. */
  readonly oracle: number;
  /** The same when only the last tokens of the text are read. */
  readonly window: number;
  readonly chance: number;
  /** Mean log-probability of the right candidate above the best wrong one, in nats. */
  readonly margin: number;
  /** Cases in which the blocks of all needed sentences were selected by some group of some layer. */
  readonly selected: number | null;
  /** Cases in which the generated text begins with the answer. */
  readonly generated: number | null;
}

export async function evaluateLong(
  reader: Reader,
  haystack: Haystack,
  grid: LongGrid,
  onProgress: (done: number, all: number) => void = () => {},
): Promise<LongCell[]> {
  const { tasks, lengths, depths, trials } = grid;
  const all = tasks.length * lengths.length * depths.length * trials;
  const cells: LongCell[] = [];
  for (const task of tasks)
    for (const length of lengths)
      for (const depth of depths)
        cells.push(
          await evaluateCell(reader, haystack, grid, { task, length, depth }, (done) =>
            onProgress(cells.length * trials + done, all),
          ),
        );
  return cells;
}

async function evaluateCell(
  reader: Reader,
  haystack: Haystack,
  { trials, seed, window, generate }: LongGrid,
  place: Pick<LongCell, 'task' | 'length' | 'depth'>,
  onProgress: (done: number) => void,
): Promise<LongCell> {
  const { task, length, depth } = place;
  let [correct, oracle, inWindow, margin, generated] = [0, 0, 0, 0, 0];
  const seen: (boolean | null)[] = [];
  for (let index = 0; index < trials; index++) {
    const one = haystack.case(task, length, depth / 100, seed, index);
    const isRight = ({ logprobs }: Scores) => Number(indexOfMax(Float64Array.from(logprobs)) === one.answer);
    const scores = await reader.score(one.prompt, one.candidates, one.ends);
    correct += isRight(scores);
    seen.push(scores.seen);
    const wrong = scores.logprobs.filter((_, i) => i !== one.answer);
    margin += scores.logprobs[one.answer] - Math.max(...wrong);
    oracle += isRight(await reader.score(one.facts, one.candidates, []));
    inWindow += isRight(await reader.score(haystack.tail(one.prompt, window), one.candidates, []));
    if (generate)
      generated += Number((await reader.generate(one.prompt)).trim().startsWith(one.candidates[one.answer]));
    onProgress(index + 1);
  }
  const isKnown = !seen.includes(null);
  return {
    ...place,
    trials,
    correct,
    found: correct / trials,
    oracle: oracle / trials,
    window: inWindow / trials,
    chance: CHANCE,
    margin: margin / trials,
    selected: isKnown ? seen.filter(Boolean).length / trials : null,
    generated: generate ? generated / trials : null,
  };
}
