/**
 * Attention by length: dense, sparse as a whole, and each part of it, forward and backward. Operations are counted by
 * the pairs a query really sees: 2 (dk + dv) for each pair and head forward, two and a half times that backward (the
 * scores are computed again), 2 dk for the scores that rank blocks, where there are more blocks than slots.
 */
import type { Device } from '../device/device.js';
import { compressedPairs, densePairs, pairsOfBlocks, scorePairs, windowPairs } from '../model/pairs.js';
import type { AttentionInputs } from '../ops/attention/branch.js';
import { combine } from '../ops/attention/combine/op.js';
import { compressedAttention } from '../ops/attention/compressed/op.js';
import { denseAttention } from '../ops/attention/dense/op.js';
import { fusedRefusal } from '../ops/attention/fused/op.js';
import { nativeSparseAttention, type SparseInputs, type SparseOptions } from '../ops/attention/nsa.js';
import { selectBlocks } from '../ops/attention/select/op.js';
import { attendSelected, chooseSelectionKernel } from '../ops/attention/selected/op.js';
import type { HeadShape, SparseShape } from '../ops/attention/shape.js';
import { windowAttention } from '../ops/attention/window/op.js';
import { castInto } from '../ops/cast/op.js';
import { Sequences } from '../ops/common/sequences.js';
import { linear } from '../ops/linear/op.js';
import { fillNormal, fillUniform } from '../tensor/random/op.js';
import { Tape } from '../tensor/tape.js';
import { Tensor } from '../tensor/tensor.js';
import { fusedSubjects } from './attention-fused.js';
import { type AttentionPart, type AttentionRow, benchSubject, type Subject, tapeSubject } from './subject.js';
import type { TimeBudget } from './timing.js';

export type { AttentionPart, AttentionRow, BenchPass } from './subject.js';

/** The measurements of `benchAttention` and their duration. */
export interface AttentionBench {
  readonly heads: HeadShape;
  readonly sparse: SparseShape;
  /** `real` ranks blocks of random keys, the worst case for memory access; `local` takes the nearest blocks. */
  readonly selection: 'real' | 'local';
  readonly budget: TimeBudget;
  /** Sequences of a batch; 1 by default. */
  readonly sequences?: number;
  /** Which kernels run, on CUDA. */
  readonly options?: SparseOptions;
}

const BACKWARD_FLOPS = 2.5;

/** Dtype of queries, keys and values. */
const precisionOf = (device: Device) => (device.kind === 'cuda' ? 'bf16' : 'f32');

/** Random tensors that are freed together. */
class RandomTensors {
  readonly #device: Device;
  readonly #seed: number;
  readonly #tensors: Tensor[] = [];

  constructor(device: Device, seed: number) {
    this.#device = device;
    this.#seed = seed;
  }

  normal(shape: readonly number[]): Tensor {
    const dtype = precisionOf(this.#device);
    const numbers = Tensor.empty(this.#device, shape);
    fillNormal(numbers, this.#nextSource());
    if (dtype === 'f32') return this.#keep(numbers);
    const tensor = this.#keep(Tensor.empty(this.#device, shape, dtype));
    castInto(this.#device, numbers, tensor);
    numbers.free();
    return tensor;
  }

  /** Between 0 and 1, in fp32: gates. */
  uniform(shape: readonly number[]): Tensor {
    const source = this.#nextSource();
    const tensor = this.#keep(Tensor.empty(this.#device, shape));
    fillUniform(tensor, source);
    return tensor;
  }

  free(): void {
    for (const tensor of this.#tensors) tensor.free();
  }

  #nextSource() {
    return { seed: this.#seed, stream: this.#tensors.length + 1 };
  }

  #keep(tensor: Tensor): Tensor {
    this.#tensors.push(tensor);
    return tensor;
  }
}

/** Rows of one length; calls `onRow` for each as it is measured. */
export function benchAttention(
  device: Device,
  S: number,
  bench: AttentionBench,
  onRow: (row: AttentionRow) => void = () => {},
): AttentionRow[] {
  const random = new RandomTensors(device, 1);
  const tokens = new Sequences(device, new Array<number>(bench.sequences ?? 1).fill(S));
  const tape = new Tape(device, { record: false });
  try {
    const subjects = attentionSubjects(tape, random, tokens, bench);
    return subjects.flatMap((subject) => benchSubject(device, subject, bench.budget, onRow));
  } finally {
    tape.end();
    random.free();
    tokens.free();
  }
}

/** A linear layer, y [rows, outputs] = x wᵀ: the speed of matrix products on this machine. */
export function benchLinear(
  device: Device,
  { rows, inputs, outputs }: { readonly rows: number; readonly inputs: number; readonly outputs: number },
  budget: TimeBudget,
  onRow: (row: AttentionRow) => void = () => {},
): AttentionRow[] {
  const random = new RandomTensors(device, 2);
  try {
    const [x, w, dy] = [
      random.normal([rows, inputs]),
      random.normal([outputs, inputs]),
      random.normal([rows, outputs]),
    ];
    const flops = 2 * rows * inputs * outputs;
    const subject = tapeSubject(
      device,
      {
        what: 'linear',
        kernel: `${rows}x${inputs}x${outputs}`,
        S: rows,
        sequences: 1,
        flops,
        backwardFlops: 2 * flops,
      },
      { inputs: [x, w], result: dy, forward: (tape) => linear(tape, x, w) },
    );
    return benchSubject(device, subject, budget, onRow);
  } finally {
    random.free();
  }
}

/** Operations of one pass over the batch. */
export type Operations = Readonly<Record<'dense' | 'cmp' | 'score' | 'sel' | 'win', number>>;

function attentionSubjects(
  tape: Tape,
  random: RandomTensors,
  tokens: Sequences,
  bench: AttentionBench,
): readonly Subject[] {
  const { heads: shape, sparse, selection, options = {} } = bench;
  const { device } = tape;
  const { heads, groups, dk, dv } = shape;
  const total = tokens.total;
  const S = tokens.longest;
  const keys = (rows: number): [Tensor, Tensor] => [
    random.normal([rows, groups, dk]),
    random.normal([rows, groups, dv]),
  ];
  const q = random.normal([total, heads, dk]);
  const [[kCmp, vCmp], [kSel, vSel], [kWin, vWin]] = [keys(tokens.compressed(sparse).total), keys(total), keys(total)];
  const gates = random.uniform([total, heads, 3]);
  const dOut = random.normal([total, heads, dv]);
  const inputs: SparseInputs = { q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates };
  const given = selection === 'local' ? localBlocks(S, groups, sparse) : null;
  const perPair = 2 * (dk + dv) * heads * tokens.count;
  const operations = (selected: ArrayLike<number>): Operations => ({
    dense: perPair * densePairs(S),
    cmp: perPair * compressedPairs(S, sparse),
    score: 2 * dk * heads * tokens.count * scorePairs(S, sparse),
    sel: (perPair / tokens.count) * pairsOfAll(selected, tokens.count, groups, sparse),
    win: perPair * windowPairs(S, sparse.w),
  });
  const describe = (what: AttentionPart, kernel: string, flops: number, backwardFlops: number | null) => ({
    what,
    kernel,
    S,
    sequences: tokens.count,
    flops,
    backwardFlops,
  });
  const problem = { heads: shape, sparse, dtype: q.dtype, tokens };
  if (fusedRefusal(problem, device, options) === null) {
    const selected = given && repeated(given, tokens.count);
    return fusedSubjects(
      tape,
      { inputs, dOut, tokens, shape: { heads: shape, sparse }, selected, options },
      (chosen) => {
        const flops = operations(chosen);
        const branches = flops.cmp + flops.sel + flops.win;
        return {
          part: (what, kernel) =>
            describe(what, kernel, flops[what], what === 'score' ? null : BACKWARD_FLOPS * flops[what]),
          whole: (kernel) => describe('nsa', kernel, branches + flops.score, BACKWARD_FLOPS * branches),
        };
      },
    );
  }
  const [cmp, sel, win]: AttentionInputs[] = [
    { q, k: kCmp, v: vCmp },
    { q, k: kSel, v: vSel },
    { q, k: kWin, v: vWin },
  ];
  const { lse } = compressedAttention(tape, cmp, tokens, sparse);
  const scored = { q, k: kCmp, lse };
  const selected = given
    ? tape.from(repeated(given, tokens.count), [total, groups, sparse.nSel], 'i32')
    : selectBlocks(tape, scored, tokens, sparse);
  const flops = operations(selected.read());
  const branches = flops.cmp + flops.sel + flops.win;
  const choice = chooseSelectionKernel(tokens.longest, options);
  const plain = device.kind === 'cuda' ? 'portable' : 'tiled';
  const attention = (
    what: 'cmp' | 'sel' | 'win' | 'dense',
    used: AttentionInputs,
    forward: (tape: Tape) => Tensor,
  ): Subject =>
    tapeSubject(device, describe(what, what === 'sel' ? choice : plain, flops[what], BACKWARD_FLOPS * flops[what]), {
      inputs: [used.q, used.k, used.v],
      result: dOut,
      forward,
    });
  return [
    attention('cmp', cmp, (own) => compressedAttention(own, cmp, tokens, sparse).out),
    tapeSubject(device, describe('score', plain, flops.score, null), {
      inputs: [],
      result: selected,
      forward: (own) => selectBlocks(own, scored, tokens, sparse),
    }),
    attention('sel', sel, (own) => attendSelected(own, sel, selected, tokens, sparse.lSel, options).out),
    attention('win', win, (own) => windowAttention(own, win, tokens, sparse.w)),
    tapeSubject(device, describe('nsa', choice, branches + flops.score, BACKWARD_FLOPS * branches), {
      inputs: Object.values(inputs),
      result: dOut,
      forward: (own) =>
        given
          ? withSelection(own, inputs, tokens, sparse, selected)
          : nativeSparseAttention(own, inputs, tokens, sparse, options).out,
    }),
    attention('dense', sel, (own) => denseAttention(own, sel, tokens)),
  ];
}

/** The whole core with given blocks. Ranking still runs, so that its time is included. */
function withSelection(
  tape: Tape,
  inputs: SparseInputs,
  tokens: Sequences,
  sparse: SparseShape,
  selected: Tensor,
): Tensor {
  const { q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates } = inputs;
  const { out: oCmp, lse } = compressedAttention(tape, { q, k: kCmp, v: vCmp }, tokens, sparse);
  selectBlocks(tape, { q, k: kCmp, lse }, tokens, sparse);
  const oSel = attendSelected(tape, { q, k: kSel, v: vSel }, selected, tokens, sparse.lSel).out;
  const oWin = windowAttention(tape, { q, k: kWin, v: vWin }, tokens, sparse.w);
  return combine(tape, gates, oCmp, oSel, oWin);
}

/** Block 0 and the nearest blocks: the selection of a model with local attention. */
export function localBlocks(length: number, groups: number, { lSel, nSel }: SparseShape): Int32Array {
  const selected = new Int32Array(length * groups * nSel).fill(-1);
  for (let t = 0; t < length; t++) {
    const current = Math.floor(t / lSel);
    const count = Math.min(nSel, current + 1);
    for (let g = 0; g < groups; g++)
      for (let i = 0; i < count; i++) selected[(t * groups + g) * nSel + i] = i === 0 ? 0 : current - (count - 1 - i);
  }
  return selected;
}

function repeated(values: Int32Array, times: number): Int32Array {
  const all = new Int32Array(values.length * times);
  for (let i = 0; i < times; i++) all.set(values, i * values.length);
  return all;
}

/** Pairs of one head over all sequences of a batch, which are equally long. */
function pairsOfAll(selected: ArrayLike<number>, sequences: number, groups: number, sparse: SparseShape): number {
  const each = selected.length / sequences;
  const values = Int32Array.from(selected);
  let pairs = 0;
  for (let i = 0; i < sequences; i++) pairs += pairsOfBlocks(values.subarray(i * each, (i + 1) * each), groups, sparse);
  return pairs;
}
