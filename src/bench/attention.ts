/**
 * Attention by length: dense, sparse as a whole, and each part of it, forward and backward. Operations are counted by
 * the pairs a query really sees: 2 (dk + dv) for each pair and head forward, two and a half times that backward (the
 * scores are computed again), 2 dk for the scores that rank blocks, where there are more blocks than slots.
 */
import type { Device } from '../device/device.js';
import type { HeadShape, SparseShape } from '../ops/attention.js';
import type { AttentionInputs } from '../ops/attention-op.js';
import { combine } from '../ops/combine/op.js';
import { compressedAttention } from '../ops/compressed/op.js';
import { denseAttention } from '../ops/dense/op.js';
import { linear } from '../ops/linear/op.js';
import { nativeSparseAttention, type SparseInputs, type SparseLayout, sparseLayout } from '../ops/nsa.js';
import { selectBlocks } from '../ops/select/op.js';
import { chooseSelectionKernel, selectedAttention } from '../ops/selected/op.js';
import { Sequences } from '../ops/sequences.js';
import { windowAttention } from '../ops/window/op.js';
import { fillNormal, fillUniform } from '../tensor/random/op.js';
import { Tape } from '../tensor/tape.js';
import { elements, Tensor } from '../tensor/tensor.js';
import { compressedPairs, densePairs, scorePairs, selectedPairs, windowPairs } from './pairs.js';
import { type Budget, type Measurement, measure } from './timing.js';

export type What = 'nsa' | 'dense' | 'cmp' | 'score' | 'sel' | 'win' | 'linear';
export type Pass = 'forward' | 'backward';

/** One row of `bench attention --json`, but for the share of the peak. */
export interface AttentionRow {
  readonly what: What;
  readonly pass: Pass;
  readonly kernel: string;
  readonly S: number;
  readonly sequences: number;
  readonly ms: number;
  readonly gflops: number;
  /** Memory beyond inputs and outputs: the pool's at its highest, and what kernels hold for themselves. */
  readonly extra_bytes: number;
}

export interface AttentionBench {
  readonly heads: HeadShape;
  readonly sparse: SparseShape;
  /** `real` ranks blocks of random keys, the worst case for memory access; `local` takes the nearest blocks. */
  readonly selection: 'real' | 'local';
  readonly budget: Budget;
}

const BACKWARD_FLOPS = 2.5;

/** One thing to measure: how to run it forward, its inputs that get gradients, and its operations. */
interface Subject {
  readonly what: What;
  readonly kernel: string;
  readonly S: number;
  readonly sequences: number;
  readonly inputs: readonly Tensor[];
  readonly forward: (tape: Tape) => Tensor;
  readonly flops: number;
  /** Null where nothing is differentiated. */
  readonly backwardFlops: number | null;
}

/** Rows of one length; `onRow` hears of each as it is measured. */
export function benchLength(
  device: Device,
  S: number,
  bench: AttentionBench,
  onRow: (row: AttentionRow) => void = () => {},
): AttentionRow[] {
  const tensors: Tensor[] = [];
  const random = (shape: readonly number[], gates = false) => {
    const tensor = Tensor.empty(device, shape);
    tensors.push(tensor);
    const source = { seed: 1, stream: tensors.length };
    if (gates) fillUniform(tensor, source);
    else fillNormal(tensor, source);
    return tensor;
  };
  const tokens = new Sequences(device, [S]);
  const layout = sparseLayout(tokens, bench.sparse);
  const tape = new Tape(device, { record: false });
  try {
    const subjects = attentionSubjects(tape, random, layout, bench);
    return subjects.flatMap((subject) => benchSubject(device, subject, random, bench.budget, onRow));
  } finally {
    tape.end();
    for (const tensor of tensors) tensor.free();
    layout.blocks.free();
    tokens.free();
  }
}

/** A linear layer, y [rows, outputs] = x wᵀ: what matrix products reach on this machine. */
export function benchLinear(
  device: Device,
  { rows, inputs, outputs }: { readonly rows: number; readonly inputs: number; readonly outputs: number },
  budget: Budget,
  onRow: (row: AttentionRow) => void = () => {},
): AttentionRow[] {
  const tensors: Tensor[] = [];
  const random = (shape: readonly number[]) => {
    const tensor = Tensor.empty(device, shape);
    tensors.push(tensor);
    fillNormal(tensor, { seed: 2, stream: tensors.length });
    return tensor;
  };
  try {
    const [x, w] = [random([rows, inputs]), random([outputs, inputs])];
    const flops = 2 * rows * inputs * outputs;
    const subject: Subject = {
      ...{ what: 'linear', kernel: `${rows}x${inputs}x${outputs}`, S: rows, sequences: 1, inputs: [x, w] },
      ...{ forward: (tape) => linear(tape, x, w), flops, backwardFlops: 2 * flops },
    };
    return benchSubject(device, subject, random, budget, onRow);
  } finally {
    for (const tensor of tensors) tensor.free();
  }
}

function attentionSubjects(
  tape: Tape,
  random: (shape: readonly number[], gates?: boolean) => Tensor,
  layout: SparseLayout,
  { heads: shape, sparse, selection }: AttentionBench,
): Subject[] {
  const { tokens, blocks } = layout;
  const { heads, groups, dk, dv } = shape;
  const S = tokens.total;
  const keys = (rows: number): [Tensor, Tensor] => [random([rows, groups, dk]), random([rows, groups, dv])];
  const q = random([S, heads, dk]);
  const [[kCmp, vCmp], [kSel, vSel], [kWin, vWin]] = [keys(blocks.total), keys(S), keys(S)];
  const gates = random([S, heads, 3], true);
  const sparseInputs: SparseInputs = { q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates };
  const [cmp, sel, win]: AttentionInputs[] = [
    { q, k: kCmp, v: vCmp },
    { q, k: kSel, v: vSel },
    { q, k: kWin, v: vWin },
  ];
  const { lse } = compressedAttention(tape, cmp, tokens, blocks, sparse);
  const scored = { q, k: kCmp, lse };
  const selected =
    selection === 'real'
      ? selectBlocks(tape, scored, tokens, blocks, sparse)
      : tape.from(localBlocks(S, groups, sparse), [S, groups, sparse.nSel], 'i32');
  const kernel = chooseSelectionKernel(tokens.longest);
  const perPair = 2 * (dk + dv) * heads;
  const flops = {
    dense: perPair * densePairs(S),
    cmp: perPair * compressedPairs(S, sparse),
    score: 2 * dk * heads * scorePairs(S, sparse),
    sel: perPair * selectedPairs(selected.read(), groups, sparse),
    win: perPair * windowPairs(S, sparse.w),
  };
  const branches = flops.cmp + flops.sel + flops.win;
  const subject = (
    what: What,
    inputs: readonly Tensor[],
    work: readonly [forward: number, backward: number | null],
    forward: (tape: Tape) => Tensor,
  ): Subject => ({
    ...{ what, S, sequences: tokens.count, inputs, forward, flops: work[0], backwardFlops: work[1] },
    kernel: what === 'nsa' || what === 'sel' ? kernel : 'tiled',
  });
  const attention = (
    what: 'cmp' | 'sel' | 'win' | 'dense',
    { q, k, v }: AttentionInputs,
    run: (tape: Tape) => Tensor,
  ) => subject(what, [q, k, v], [flops[what], BACKWARD_FLOPS * flops[what]], run);
  return [
    attention('cmp', cmp, (own) => compressedAttention(own, cmp, tokens, blocks, sparse).out),
    subject('score', [], [flops.score, null], (own) => selectBlocks(own, scored, tokens, blocks, sparse)),
    attention('sel', sel, (own) => selectedAttention(own, sel, selected, tokens, sparse.lSel)),
    attention('win', win, (own) => windowAttention(own, win, tokens, sparse.w)),
    subject('nsa', Object.values(sparseInputs), [branches + flops.score, BACKWARD_FLOPS * branches], (own) =>
      selection === 'real'
        ? nativeSparseAttention(own, sparseInputs, layout, sparse).out
        : withSelection(own, sparseInputs, layout, sparse, selected),
    ),
    attention('dense', sel, (own) => denseAttention(own, sel, tokens)),
  ];
}

/** The whole core with the blocks given; they are ranked all the same, so that the time of ranking is in it. */
function withSelection(
  tape: Tape,
  inputs: SparseInputs,
  { tokens, blocks }: SparseLayout,
  sparse: SparseShape,
  selected: Tensor,
): Tensor {
  const { q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates } = inputs;
  const { out: oCmp, lse } = compressedAttention(tape, { q, k: kCmp, v: vCmp }, tokens, blocks, sparse);
  selectBlocks(tape, { q, k: kCmp, lse }, tokens, blocks, sparse);
  const oSel = selectedAttention(tape, { q, k: kSel, v: vSel }, selected, tokens, sparse.lSel);
  const oWin = windowAttention(tape, { q, k: kWin, v: vWin }, tokens, sparse.w);
  return combine(tape, gates, oCmp, oSel, oWin);
}

/** Block 0 and the nearest ones: what a model that looks close by selects. */
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

function benchSubject(
  device: Device,
  subject: Subject,
  random: (shape: readonly number[]) => Tensor,
  budget: Budget,
  onRow: (row: AttentionRow) => void,
): AttentionRow[] {
  const { forward, inputs } = subject;
  let outShape: readonly number[] = [];
  const forwardTime = measure(
    device,
    () => {
      const tape = new Tape(device, { record: false });
      const run = () => {
        outShape = forward(tape).shape;
      };
      return { run, end: () => tape.end() };
    },
    budget,
  );
  const rows = [rowOf(device, subject, 'forward', forwardTime, elements(outShape) * 4, subject.flops)];
  onRow(rows[0]);
  if (subject.backwardFlops === null) return rows;
  const dOut = random(outShape);
  const backwardTime = measure(
    device,
    () => {
      const tape = new Tape(device);
      for (const input of inputs) tape.watch(input);
      tape.seedWith(forward(tape), dOut);
      return { run: () => tape.backward(), end: () => tape.end() };
    },
    budget,
  );
  const gradientBytes = inputs.reduce((total, { bytes }) => total + bytes, 0);
  rows.push(rowOf(device, subject, 'backward', backwardTime, gradientBytes, subject.backwardFlops));
  onRow(rows[1]);
  return rows;
}

function rowOf(
  device: Device,
  { what, kernel, S, sequences }: Subject,
  pass: Pass,
  { ms, peakBytes }: Measurement,
  resultBytes: number,
  flops: number,
): AttentionRow {
  const scratch = 'scratchBytes' in device ? Number(device.scratchBytes) : 0;
  const extra = Math.max(0, peakBytes - resultBytes) + scratch;
  return { what, pass, kernel, S, sequences, ms, gflops: flops / ms / 1e6, extra_bytes: extra };
}
