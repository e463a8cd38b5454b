/**
 * The fused attention core (CUDA, bf16) and its parts. They are stages of one operation, so each is launched by itself over
 * buffers that one whole pass has filled. Packing keys counts for the branch of the keys; building the lists and
 * the gated sum count for the selected branch. Its kernels compute the window too: the time of the selected branch
 * includes it.
 */

import { cudaRuntime } from '../device/cuda/runtime.js';
import { AttentionCounters } from '../ops/attention/counters.js';
import { denseAttention } from '../ops/attention/dense/op.js';
import { allocateBackward, backwardPath, FusedBackward, type Gradients } from '../ops/attention/fused/backward.js';
import { FusedBatch } from '../ops/attention/fused/code.js';
import { denseRefusal, fusedDenseAttention } from '../ops/attention/fused/dense.js';
import { allocateRanked, allocateResults, allocateScratch, FusedForward } from '../ops/attention/fused/forward.js';
import { fusedBuild, fusedPath } from '../ops/attention/fused/op.js';
import type { BatchPlan, FusedShape } from '../ops/attention/fused/plan.js';
import { nativeSparseAttention, type SparseInputs, type SparseOptions } from '../ops/attention/nsa.js';
import type { Sequences } from '../ops/common/sequences.js';
import type { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import { type Description, type Subject, tapeSubject } from './subject.js';
import type { Trial } from './timing.js';

export interface FusedBench {
  readonly inputs: SparseInputs;
  readonly dOut: Tensor;
  readonly tokens: Sequences;
  readonly shape: FusedShape;
  /** Blocks to use instead of the ranked ones. Ranking still runs, so that its time is included. */
  readonly selected: Int32Array | null;
  readonly options: SparseOptions;
}

/** Counts operations from the selected blocks, which are known after a first pass. */
export interface Descriptions {
  part(what: 'cmp' | 'score' | 'sel' | 'win' | 'dense', kernel: string): Description;
  whole(kernel: string): Description;
}

/** Buffers belong to `tape`, which must outlive the measurements. */
export function fusedSubjects(
  tape: Tape,
  bench: FusedBench,
  describe: (selected: ArrayLike<number>) => Descriptions,
): Subject[] {
  const { device } = tape;
  const { inputs, dOut, tokens, shape, options } = bench;
  const cuda = cudaRuntime(device);
  if (!cuda) throw new Error('the fused attention kernels need a CUDA device');
  const batch = new FusedBatch(cuda, shape, fusedBuild(options), tokens);
  const path = batch.pathOf(fusedPath(options));
  const ordered = options.deterministic ?? false;
  const ranked = allocateRanked(tape, batch);
  const results = allocateResults(tape, batch, ranked);
  const scratch = allocateScratch(tape, batch, path, ranked);
  const forward = new FusedForward(batch, inputs, results, scratch);
  // With given blocks the ranking writes to a buffer that is not read.
  const unread = (like: Tensor) => (bench.selected ? tape.empty(like.shape, like.dtype) : like);
  const ranking = new FusedForward(
    batch,
    inputs,
    { ...results, selected: unread(results.selected) },
    { ...scratch, counts: unread(scratch.counts), ranks: unread(scratch.ranks) },
  );
  if (bench.selected) {
    const { counts, ranks } = countChoices(bench.selected, tokens, shape, batch.plan);
    results.selected.write(bench.selected);
    scratch.counts.write(counts);
    scratch.ranks.write(ranks);
  }
  const counters = new AttentionCounters(device);
  const select = (served: Tensor | null = null) => {
    forward.packSelected();
    forward.index(path);
    if (ordered) forward.sort();
    forward.selected(path, served);
  };
  const whole = (served: Tensor | null = null) => {
    forward.packCompressed();
    forward.compressed();
    ranking.select();
    forward.packWindow();
    select(served);
  };
  whole(counters.served);
  const gradients = Object.fromEntries(
    Object.entries(inputs).map(([name, tensor]: [string, Tensor]) => [name, tape.empty(tensor.shape, tensor.dtype)]),
  ) as unknown as Gradients;
  const backwardScratch = allocateBackward(tape, batch, backwardPath(batch, options));
  const backward = new FusedBackward(batch, inputs, results, backwardScratch, dOut, gradients);
  backward.run(ordered);
  const { attention_outer, attention_gather } = counters.read();
  counters.free();
  const kernel =
    options.kernel === 'v1' ? 'v1' : attention_outer > 0 ? 'v2 outer' : attention_gather > 0 ? 'v2 gather' : 'v2 union';
  const description = describe(results.selected.read());
  const part = (
    what: 'cmp' | 'score' | 'sel' | 'win',
    run: () => void,
    runBackward: (() => void) | null,
    [held, heldBackward]: readonly [Tensors, Tensors],
  ): Subject => ({
    description: description.part(what, what === 'sel' ? kernel : 'fused'),
    forward: { start: repeatable(run), resultBytes: 0, heldBytes: bytes(held) },
    backward: runBackward && { start: repeatable(runBackward), resultBytes: 0, heldBytes: bytes(heldBackward) },
  });
  const { packedCmp, packedSel, packedWin, ...listing } = scratch;
  const { shares, keySums, valueSums, querySums, delta, shift } = backwardScratch;
  const rowWeights = [delta, shift];
  return [
    part(
      'cmp',
      () => {
        forward.packCompressed();
        forward.compressed();
      },
      () => {
        if (querySums)
          backward.streamed(querySums); // of the window too
        else {
          backward.compressedKeys(ordered);
          backward.streamedQueries();
        }
      },
      [
        [packedCmp],
        [backwardScratch.packedCmp, backwardScratch.packedWin, keySums, valueSums, querySums, ...rowWeights],
      ],
    ),
    part('score', () => ranking.select(), null, [[scratch.counts, scratch.ranks], []]),
    part(
      'sel',
      () => select(),
      () => {
        if (!ordered) backward.clear();
        backward.selectedKeys(ordered);
        backward.selectedQueries();
        if (!ordered) backward.round();
      },
      [
        [packedSel, ...Object.values(listing), results.lists, results.offsets, results.backwardItems],
        [shares, keySums, valueSums, ...rowWeights],
      ],
    ),
    part(
      'win',
      () => {
        forward.packWindow();
        forward.window();
      },
      () => backward.windowKeys(inputs.q),
      [[packedWin], rowWeights],
    ),
    bench.selected
      ? {
          description: description.whole(kernel),
          forward: { start: repeatable(() => whole()), resultBytes: 0, heldBytes: bytes(Object.values(scratch)) },
          backward: {
            start: repeatable(() => backward.run(ordered)),
            resultBytes: 0,
            heldBytes: bytes(Object.values(backwardScratch)),
          },
        }
      : tapeSubject(device, description.whole(kernel), {
          inputs: Object.values(inputs),
          result: dOut,
          forward: (own) => nativeSparseAttention(own, inputs, tokens, shape.sparse, options).out,
        }),
    denseSubject(tape, bench, description),
  ];
}

function denseSubject(tape: Tape, { inputs, dOut, tokens, shape }: FusedBench, description: Descriptions): Subject {
  const { device } = tape;
  const used = { q: inputs.q, k: inputs.kSel, v: inputs.vSel };
  const problem = { heads: shape.heads, dtype: used.q.dtype, tokens };
  const fused = denseRefusal(problem, device) === null;
  return tapeSubject(device, description.part('dense', fused ? 'fused' : 'portable'), {
    inputs: Object.values(used),
    result: dOut,
    forward: (own) => (fused ? fusedDenseAttention : denseAttention)(own, used, tokens),
  });
}

type Tensors = readonly (Tensor | null)[];

function bytes(tensors: Tensors): number {
  return tensors.reduce((total, tensor) => total + (tensor?.bytes ?? 0), 0);
}

/** Kernels that overwrite what they wrote before. */
function repeatable(run: () => void): () => Trial {
  return () => ({ run, end: () => {} });
}

/** Counts as the ranking kernel does: choices per (block, stretch), and the rank of each choice. */
export function countChoices(
  selected: Int32Array,
  { lengths }: Pick<Sequences, 'lengths'>,
  { heads: { groups }, sparse: { lSel, nSel } }: FusedShape,
  { blocks, lists, stretch, stretches }: Pick<BatchPlan, 'blocks' | 'lists' | 'stretch' | 'stretches'>,
): { readonly counts: Int32Array; readonly ranks: Int32Array } {
  const counts = new Int32Array(lists * stretches);
  const ranks = new Int32Array(selected.length);
  let [token, firstBlock] = [0, 0];
  for (const length of lengths) {
    for (let t = 0; t < length; t++, token++)
      for (let group = 0; group < groups; group++)
        for (let slot = 0; slot < nSel; slot++) {
          const at = (token * groups + group) * nSel + slot;
          const block = selected[at];
          const isForced = block <= 0 || block >= Math.floor(t / lSel) - 1;
          if (isForced) continue;
          const list = group * blocks + firstBlock + block;
          ranks[at] = counts[list * stretches + Math.floor(token / stretch)]++;
        }
    firstBlock += Math.ceil(length / lSel);
  }
  return { counts, ranks };
}
