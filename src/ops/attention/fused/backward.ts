/**
 * The backward pass of the fused attention core, kernel by kernel. Keys and values are the outer loop of their own
 * gradients; the queries' gradient is computed by a second pass with queries outer (compressed, window) or as shares
 * per selected block, so that no atomic additions are needed. Where possible (`joint`) one kernel computes all of the
 * compressed and the window branch instead and adds the queries' gradient up in fp32. The gate enters through the
 * log-sum-exp, so dOut is never scaled.
 */
import type { Tape } from '../../../tensor/tape.js';
import type { Tensor } from '../../../tensor/tensor.js';
import type { SparseInputs } from '../nsa.js';
import type { FusedBatch } from './code.js';
import type { ForwardResults } from './forward.js';
import { packedTileBytes, querySumRows, rowLanes } from './plan.js';
import { type FusedScorer, partRows } from './scorer.js';

export type GradientName = keyof SparseInputs;
/** `qWin` is there if it is among the inputs. */
export type Gradients = Readonly<Record<Exclude<GradientName, 'qWin'>, Tensor>> & { readonly qWin?: Tensor };

/** Memory that only the backward pass needs. */
export interface BackwardScratch {
  /** Null with `joint`; `packedWin` is there all the same if the window branch has queries of its own. */
  readonly packedCmp: Tensor | null;
  readonly packedWin: Tensor | null;
  /** [3, T, H]: rowsum(dOut * branch), and the log-sum-exp in base 2 with the gate in it. */
  readonly delta: Tensor;
  readonly shift: Tensor;
  /** Gradients of the queries from the selected branch by slot, [T, G, n, h, dk]. */
  readonly shares: Tensor;
  /**
   * fp32 sums of the compressed and the selected branch, keys and values. By default kernels add to them in the order
   * they finish; in deterministic mode they are the parts of one branch at a time, added in order afterwards.
   */
  readonly keySums: Tensor;
  readonly valueSums: Tensor;
  /** fp32 sums of the queries' gradient of both branches that one kernel computes, or null. */
  readonly querySums: Tensor | null;
  /** Parts of the gradient that the scorer loss gives the compressed keys, or null. */
  readonly scorerParts: Tensor | null;
}

/** `joint`: one kernel for all gradients of the compressed and the window branch. */
export interface BackwardPath {
  readonly ordered: boolean;
  readonly joint: boolean;
}

export function backwardPath(
  batch: FusedBatch,
  options: { readonly deterministic?: boolean; readonly joint?: boolean },
): BackwardPath {
  const { deterministic: ordered = false, joint = true } = options;
  return { ordered, joint: joint && !ordered && batch.hasJoint };
}

export function allocateBackward(tape: Tape, batch: FusedBatch, { ordered, joint }: BackwardPath): BackwardScratch {
  const { plan, shape } = batch;
  const { heads, groups, dk, dv } = shape.heads;
  const { nSel, lSel } = shape.sparse;
  const tile = packedTileBytes(shape.heads) / 2;
  const keys = plan.compressed * groups;
  const parts = Math.max(plan.compressedChunks * keys, plan.backwardItems * lSel);
  const rows = ordered ? parts : keys + plan.tokens * groups;
  return {
    packedCmp: joint ? null : tape.empty([plan.compressedTiles, tile], 'bf16'),
    packedWin: joint && !batch.build.windowApart ? null : tape.empty([plan.tokenTiles(64), tile], 'bf16'),
    delta: tape.empty([3, plan.tokens, heads]),
    shift: tape.empty([3, plan.tokens, heads]),
    shares: tape.empty([plan.tokens, heads, nSel, dk], 'bf16'),
    keySums: tape.empty([rows, dk]),
    valueSums: tape.empty([rows, dv]),
    querySums: joint ? tape.empty([querySumRows(plan, shape), dk]) : null,
    scorerParts: batch.build.scored ? tape.empty([partRows(batch), dk]) : null,
  };
}

/** Indices of the branches in `delta` and `shift`. */
const [CMP, SEL, WIN] = [0, 1, 2];

export class FusedBackward {
  readonly batch: FusedBatch;
  readonly inputs: SparseInputs;
  readonly results: ForwardResults;
  readonly scratch: BackwardScratch;
  readonly dOut: Tensor;
  /** Overwritten, never added to. */
  readonly into: Gradients;

  constructor(
    batch: FusedBatch,
    inputs: SparseInputs,
    results: ForwardResults,
    scratch: BackwardScratch,
    dOut: Tensor,
    into: Gradients,
  ) {
    this.batch = batch;
    this.inputs = inputs;
    this.results = results;
    this.scratch = scratch;
    this.dOut = dOut;
    this.into = into;
  }

  /** All launches. `ordered` requires that the forward pass has sorted the lists. */
  run(ordered: boolean, scorer: FusedScorer | null = null): void {
    this.prepare();
    scorer?.addToDelta(this.#weights(CMP)[1]);
    if (!ordered) this.clear();
    const { inputs, into } = this;
    if (inputs.qWin && into.qWin) this.windowApart(inputs.qWin, into.qWin);
    if (this.scratch.querySums) this.streamed(this.scratch.querySums);
    else {
      this.compressedKeys(ordered);
      if (!inputs.qWin) this.windowKeys(inputs.q);
      this.streamedQueries();
    }
    this.selectedKeys(ordered);
    if (scorer) this.scorerGradients(scorer, ordered);
    this.selectedQueries();
    if (!ordered) this.round();
  }

  /** Zeroes the sums that kernels add to. */
  clear(): void {
    this.scratch.keySums.zero();
    this.scratch.valueSums.zero();
    this.scratch.querySums?.zero();
  }

  /** The gates' gradient, and delta and shift of every row for the other kernels. */
  prepare(): void {
    const { batch, inputs, results, scratch, into } = this;
    const lanes = rowLanes(batch.shape.heads.dv);
    batch.launch(
      'combine',
      'combine_backward',
      { grid: Math.ceil((batch.rows * lanes) / 256), block: 256 },
      ...[this.dOut, results.oCmp, results.oSel, results.oWin, inputs.gates],
      ...[results.lseCmp, results.lseSel, results.lseWin, into.gates, scratch.delta, scratch.shift, batch.plan.tokens],
    );
  }

  /** The compressed and the window branch by one kernel, which adds the queries' gradient to sums. */
  streamed(querySums: Tensor): void {
    const { batch, inputs, scratch, into } = this;
    const { plan, groups, tokenStarts, compressedStarts, blockStarts, sequences } = batch;
    const constant = (what: string) => batch.constant('joint', `joint_gradients_${what}`);
    const keys = plan.compressed * groups;
    const tiles = plan.keyTiles(constant('keys'));
    const chunks = Math.ceil(plan.longest / constant('chunk'));
    batch.launch(
      'joint',
      'joint_gradients',
      {
        grid: (tiles * chunks + (batch.build.windowApart ? 0 : plan.tokenTiles(constant('keys')))) * groups,
        block: constant('threads'),
        shared: constant('shared'),
      },
      ...[inputs.q, this.dOut, scratch.shift, scratch.delta],
      ...[inputs.kCmp, inputs.vCmp, this.#sums(0, keys, 'key', false), this.#sums(0, keys, 'value', false)],
      ...[inputs.kWin, inputs.vWin, into.kWin, into.vWin, querySums],
      ...[tokenStarts, compressedStarts, blockStarts, sequences, tiles, chunks],
    );
  }

  compressedKeys(ordered: boolean): void {
    const { batch, inputs, into } = this;
    const { plan, groups, tokenStarts, compressedStarts, sequences } = batch;
    const { dk, dv } = batch.shape.heads;
    const keys = plan.compressed * groups;
    const [dKeys, dValues] = [this.#sums(0, keys, 'key', ordered), this.#sums(0, keys, 'value', ordered)];
    batch.launch(
      'compressed',
      'compressed_backward',
      {
        grid: [plan.compressedTiles, plan.compressedChunks, groups],
        block: 128,
        shared: batch.constant('compressed', 'compressed_backward_shared'),
      },
      ...[inputs.q, inputs.kCmp, inputs.vCmp, this.dOut, ...this.#weights(CMP), dKeys, dValues],
      ...[tokenStarts, compressedStarts, sequences, Number(ordered)],
    );
    if (ordered) {
      const grid = [Math.ceil((keys * Math.max(dk, dv)) / 1024), 2] as const;
      const place = [tokenStarts, compressedStarts, sequences] as const;
      batch.launch(
        'compressed',
        'compressed_sum',
        { grid, block: 256 },
        dKeys,
        dValues,
        into.kCmp,
        into.vCmp,
        ...place,
      );
    }
  }

  /** And the shares of the queries' gradient. */
  selectedKeys(ordered: boolean): void {
    const { batch, inputs, results, scratch, into } = this;
    const { plan, groups, tokenStarts, blockStarts, sequences, shape } = batch;
    const { dk, dv } = shape.heads;
    const first = plan.compressed * groups;
    const rows = plan.tokens * groups;
    const [dKeys, dValues] = [this.#sums(first, rows, 'key', ordered), this.#sums(first, rows, 'value', ordered)];
    batch.launch(
      'selected',
      'selected_backward',
      { grid: plan.backwardItems, block: 128, shared: batch.constant('selected', 'selected_backward_shared') },
      ...[inputs.q, inputs.kSel, inputs.vSel, this.dOut, ...this.#weights(SEL), scratch.shares, dKeys, dValues],
      ...[results.backwardItems, results.offsets, results.lists, tokenStarts, blockStarts, sequences, Number(ordered)],
    );
    if (ordered) {
      const grid = [plan.lists, Math.ceil((shape.sparse.lSel * Math.max(dk, dv)) / 1024), 2] as const;
      const place = [results.offsets, tokenStarts, blockStarts, sequences] as const;
      batch.launch('selected', 'selected_sum', { grid, block: 256 }, dKeys, dValues, into.kSel, into.vSel, ...place);
    }
  }

  /** The scorer loss's part of the gradients of queries and compressed keys, beside what the branches left. */
  scorerGradients(scorer: FusedScorer, ordered: boolean): void {
    const { shares, scorerParts } = this.scratch;
    if (!scorerParts) throw new Error('no memory for the scorer loss');
    const keys = this.batch.plan.compressed * this.batch.groups;
    scorer.addGradients(shares, scorerParts, ordered ? null : this.#sums(0, keys, 'key', false), this.into.kCmp);
  }

  windowKeys(queries: Tensor): void {
    const { batch, inputs, into } = this;
    batch.launch(
      'window',
      'window_backward',
      {
        grid: [batch.plan.tokenTiles(64), batch.groups],
        block: 128,
        shared: batch.constant('window', 'window_backward_shared'),
      },
      ...[queries, inputs.kWin, inputs.vWin, this.dOut, ...this.#weights(WIN), into.kWin, into.vWin],
      ...[batch.tokenStarts, batch.sequences],
    );
  }

  /** All gradients of a window branch with queries of its own. */
  windowApart(queries: Tensor, into: Tensor): void {
    const { batch, inputs } = this;
    const packed = this.#packed('packedWin');
    this.windowKeys(queries);
    batch.packWindow(inputs.kWin, inputs.vWin, packed);
    batch.launchTiles(
      ...(['window', 'window_query_gradient', queries, packed, this.dOut, ...this.#weights(WIN)] as const),
      ...[into, batch.tokenStarts, batch.sequences],
    );
  }

  /** The queries' gradient of the compressed branch, and of the window branch with the same queries. */
  streamedQueries(): void {
    const { batch, inputs, scratch, into } = this;
    const [packedCmp, packedWin] = [this.#packed('packedCmp'), this.#packed('packedWin')];
    batch.packCompressed(inputs.kCmp, inputs.vCmp, packedCmp);
    if (!inputs.qWin) batch.packWindow(inputs.kWin, inputs.vWin, packedWin);
    batch.launchTiles(
      'compressed',
      'compressed_window_query_gradient',
      ...[inputs.q, packedCmp, packedWin, this.dOut, scratch.shift, scratch.delta, into.q],
      ...[batch.tokenStarts, batch.sequences],
    );
  }

  /** Adds the selected branch's, also to the others' sums where there are any. */
  selectedQueries(): void {
    const { batch, results, scratch, into } = this;
    const lanes = rowLanes(batch.shape.heads.dk);
    batch.launch(
      'selected',
      'selected_query_gradient',
      { grid: Math.ceil((batch.rows * lanes) / 256), block: 256 },
      ...[into.q, scratch.shares, results.selected, batch.plan.tokens],
      ...[scratch.querySums, batch.tokenStarts, batch.blockStarts, batch.sequences],
    );
  }

  /** Gradients of the compressed and the selected keys and values from their sums, in one launch. */
  round(): void {
    const { batch, scratch, into } = this;
    const { keySums, valueSums } = scratch;
    const compressed = batch.plan.compressed * batch.groups;
    const selected = batch.plan.tokens * batch.groups;
    const sums = [keySums, valueSums].flatMap((all) => [
      all.rows(0, compressed),
      all.rows(compressed, compressed + selected),
    ]);
    batch.launch(
      'combine',
      'round_sums',
      { grid: Math.ceil((keySums.size + valueSums.size) / 8 / 256), block: 256 },
      ...[...sums, into.kCmp, into.kSel, into.vCmp, into.vSel, compressed, selected],
    );
  }

  /** A branch's rows of the sums; in deterministic mode the memory of the parts, all of which are written. */
  #sums(first: number, count: number, what: 'key' | 'value', ordered: boolean): Tensor {
    const { keySums, valueSums } = this.scratch;
    const all = what === 'key' ? keySums : valueSums;
    return ordered ? all : all.rows(first, first + count);
  }

  #packed(which: 'packedCmp' | 'packedWin'): Tensor {
    const packed = this.scratch[which];
    if (!packed) throw new Error('no memory for packed keys: the joint kernel was to run');
    return packed;
  }

  #weights(branch: number): [shift: Tensor, delta: Tensor] {
    return [this.scratch.shift.rows(branch, branch + 1), this.scratch.delta.rows(branch, branch + 1)];
  }
}
